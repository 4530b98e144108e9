"""NumPy's files: arrays whose first axis is samples, archives of arrays, a file a sample."""
