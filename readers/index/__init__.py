"""Build, keep, find and open the index of a dataset, which describes it shard by shard."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
