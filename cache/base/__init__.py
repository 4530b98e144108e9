"""Define small values and tools that all of the cache uses: blobs, stores, locks, folders, sizes
and counters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
