"""What a user asks a loader for, checked once and turned into values."""
