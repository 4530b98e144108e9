"""Adapt loaders to one interface, so that all of them do the same work on the same files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
