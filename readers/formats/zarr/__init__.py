"""Read Zarr hierarchies of versions 2 and 3: arrays as fields, chunk by chunk where they lie."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
