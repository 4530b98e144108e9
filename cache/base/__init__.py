"""Small values and tools of the whole cache: blobs, stores, locks, folders, sizes and counters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
