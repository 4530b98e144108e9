"""What is known of one kind of field: its type, what its bytes say, whether they are good, and how
they become values."""
