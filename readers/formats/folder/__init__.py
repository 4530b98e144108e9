"""Read folders in which a sample is a file, files that share a name, or a table's row."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
