"""Adapt other people's loaders to one interface: the same files, the same work.

Each module adapts one library and imports it inside functions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
