"""Plan a job: order, steps, needs and state. Only `world` isn't pure: it asks the environment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
