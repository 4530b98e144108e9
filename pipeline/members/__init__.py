"""Connect a loader to the ranks of its job; `job_membership` lists what they exchange, and when."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
