"""The cache folder on the node's disk: its layout, its books, and the blobs that it keeps."""
