"""Read NumPy's files: .npy whose first axis is samples, .npz, and a file a sample."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
