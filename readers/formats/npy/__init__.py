"""Read NumPy files: .npy and .npz, whose samples are rows, windows of rows, or whole files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
