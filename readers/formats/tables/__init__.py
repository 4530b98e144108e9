"""Turn columns of Arrow types into fields and samples: what Parquet and Arrow files share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
