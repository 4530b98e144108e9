"""Locate a dataset's files from its URL, and explain files that are left out or can't be read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
