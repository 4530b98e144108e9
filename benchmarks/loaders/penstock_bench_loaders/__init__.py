"""Adapters of other loaders for `penstock bench --against` and `make bench`, one module each."""
