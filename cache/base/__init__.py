"""Small tools that every room of the cache uses: keys of blobs, sizes, locks, folders, limits."""
