"""The store of a few objects that the tests of blobs use, and a server of blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.base import Peers
from tests.cache.blobs.conftest import store
from tests.cache.peers.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["store"]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An empty cache and its server, without and with TLS."""
    peers = Peers("127.0.0.1:0", tls=request.param)
    with serving(tmp_path_factory.mktemp("cache"), peers) as found:
        yield found
