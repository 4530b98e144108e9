"""The version, apart from the root package: layers that imported that would close a circle."""

__version__ = "0.1.0"
