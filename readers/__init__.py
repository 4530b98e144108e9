"""Read datasets: describe and index their samples, open their shards, deliver batches of columns.

A dataset is a folder, files or a pack, on this machine or behind a URL. The names below load their
modules when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
