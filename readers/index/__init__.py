"""The index of a dataset: what is there, shard by shard, where it is kept and how it is built."""
