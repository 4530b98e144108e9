"""Describe what is done to each sample on its way to a tensor: operations, recipes, presets.

The names here are plain values. Importing them loads neither DALI nor torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
