"""Read files of token ids: flat ones, and Megatron's .bin with an .idx of its documents."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
