"""Measure what the input side can do, what limits it, and what other loaders do on the same data.

This is the library behind `penstock bench`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
