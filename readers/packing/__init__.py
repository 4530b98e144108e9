"""Write packs: a seeded shuffle, every sample checked once, resumable at any moment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
