"""Writing packs: a seeded shuffle, every image decoded once, resumable at any moment."""
