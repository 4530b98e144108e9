"""Read Zarr hierarchies of versions 2 and 3: arrays are fields, read and decoded by chunk."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
