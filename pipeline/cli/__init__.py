"""Provide the `penstock` command as a table of library calls, one module per command."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
