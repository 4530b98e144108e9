"""Order, prefetch and deliver the samples of a training job, and report what holds it back.

Importing the package loads neither torch nor DALI: its public names are imported at first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
