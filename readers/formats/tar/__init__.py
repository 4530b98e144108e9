"""Tar archives as WebDataset writes them, read in place."""
