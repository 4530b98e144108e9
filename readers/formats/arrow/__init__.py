"""Read Arrow IPC files and streams, Feather's too."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
