"""Mixtures of datasets: exact shares at every position, epochs, and weights that change."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
