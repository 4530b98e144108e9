"""Recognise, index and open datasets of each file format: one module or package per format.

Read `format` first, which is the contract, then `record_format` (the base of simple formats),
`chunked` (the base of formats whose samples are decoded in chunks) or `block_format` (the base of
simple ones of these).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
