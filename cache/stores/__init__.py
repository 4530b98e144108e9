"""Open and read remote stores: web servers, buckets of s3, gs and az, and fsspec's file systems."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
