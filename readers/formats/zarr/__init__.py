"""Zarr groups and arrays, versions 2 and 3."""
