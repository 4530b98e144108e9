"""The store of a few objects that the tests of blobs have."""

from tests.cache.blobs.conftest import store

__all__ = ["store"]
