"""Where a dataset's bytes lie, and what lies beside them that isn't read."""
