"""Read torch datasets: torch's DataLoader and workers inside, order and state around them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
