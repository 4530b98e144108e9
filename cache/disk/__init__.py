"""Keep blobs in the cache folder on the node's disk, within its limit and through any crash.

Crash safety lies in the order of system calls: each file is written, checked and renamed, and the
catalogue can be rebuilt from the files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
