"""Small objects are fetched once a node; what the remote said of a name is remembered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache import FetchError, PenstockWarning
from penstock.cache.base import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore


def test_small_objects_are_fetched_once_a_node(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    one, two = remotes(store), remotes(store)
    for remote in (one, two, one):
        path = remote.object("o1", size_bytes=4096, version="v")
        assert Path(os.fsdecode(path)).read_bytes() == store.objects["o1"]
    assert len(store.reads) == 1
    assert two.object("o1", size_bytes=None, version="v") == path
    one.drop_object("o1", size_bytes=4096, version="v")
    two.object("o1", size_bytes=4096, version="v")
    assert len(store.reads) == 2
    bare = remotes(store, max_bytes=None)
    own = bare.object("o1", size_bytes=None, version="v")
    assert Path(os.fsdecode(own)).read_bytes() == store.objects["o1"]
    bare.close()
    assert not os.path.exists(own)


def test_what_the_remote_said_is_remembered(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    found = remote.find("o0")
    assert remote.find("nothing") is None

    def gone(_path: str, _span: object) -> None:
        raise RequestError("refused", "no route")

    store.before = gone
    with pytest.warns(PenstockWarning, match="the remote can't be reached"):
        assert remote.find("o0") == found
    assert remote.find("nothing") is None  # one warning
    with pytest.raises(FetchError):
        remote.find("o1")
