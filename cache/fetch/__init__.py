"""Fetch ranges of a store's objects: in parallel, retried, hedged, limited and counted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
