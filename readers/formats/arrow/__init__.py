"""Read Arrow IPC files and streams, and Feather files of version 2."""
