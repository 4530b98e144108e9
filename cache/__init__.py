"""Fetch the bytes of objects from remote stores and keep them in the node's cache.

This layer doesn't know what a sample is.
"""

import lazy_loader

from penstock.cache.errors import log
from penstock.cache.secrets import SafeLog

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

log.addFilter(SafeLog())
