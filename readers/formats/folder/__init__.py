"""Image folders: one file a sample, grouped into virtual shards."""
