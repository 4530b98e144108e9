"""Read Parquet files: footers by a bounded parser of our own, column chunks by pyarrow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
