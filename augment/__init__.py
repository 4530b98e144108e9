"""Define, check and run the operations that turn each sample into tensors.

Importing this package loads neither DALI nor torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
