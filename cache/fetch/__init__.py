"""Fetch ranges of a store's objects in parallel, with retries, hedges, limits and counts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
