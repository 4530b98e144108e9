"""Arrow IPC files (Feather too), and what Arrow's types and values are as fields."""
