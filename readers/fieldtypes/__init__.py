"""Define the types of fields, check and decode their values, and hold them in batch columns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
