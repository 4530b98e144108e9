from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from penstock.readers import Dataset
from tests.readers.formats.npy.arrays import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["local", "remote"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Dataset]]:
    """Open tmp_path / "set", or a file in it: locally, or from a store with a cache.

    again: with the cache of the last call.
    """
    place = f"/npy-{tmp_path.name}"
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def open(name: str = "", *, again: bool = False, **options: Any) -> Dataset:
            where: Any = tmp_path / "set" / name
            if request.param == "remote":
                upload(tmp_path / "set", place)
                where = f"memory:/{place}/{name}".rstrip("/")
            cache = "again" if again else f"cache-{next(numbers)}"
            options.setdefault("cache", tmp_path / cache)
            return stack.enter_context(Dataset(where, **options))

        yield open
    memory = fsspec.filesystem("memory")
    if memory.exists(place):
        memory.rm(place, recursive=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    return tmp_path / "set"
