"""Connect a loader to the ranks of its job: membership, channel, lane order, waits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
