"""Turn a plan's positions into batches of tensors. Read `batch_pipeline` first."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
