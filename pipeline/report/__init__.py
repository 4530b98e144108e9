"""Measure what a loader and its job do, and judge what holds them back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
