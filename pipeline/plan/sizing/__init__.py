"""Forecast what a job's input side will do on given hardware, before it is rented. Pure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
