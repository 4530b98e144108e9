"""Read WebDataset's tar files where they lie; nothing is ever extracted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
