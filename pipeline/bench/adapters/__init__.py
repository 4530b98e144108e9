"""Other people's loaders behind one interface: the same files, the same work."""
