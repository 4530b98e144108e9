"""Reading a batch's samples: open shards, bytes, and the memory that they are copied into."""
