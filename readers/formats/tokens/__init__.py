"""Read files of token ids: flat files, and Megatron's .bin files with an .idx of documents."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
