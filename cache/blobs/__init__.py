"""Objects of a store as open blobs, read through the cache folder where there is one."""
