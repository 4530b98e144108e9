"""Datasets of every kind, and servers that serve them."""

from __future__ import annotations

import shutil
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest

from penstock.readers import build_index, pack
from tests import images, tars
from tests.files import uploaded
from tests.readers.remote_sets import KINDS, SAMPLES
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder and tar files without indexes, and a pack of some shards."""
    root = tmp_path_factory.mktemp("remote")
    images.class_folder(root / "set", samples=SAMPLES)
    tars.tar_folder(root / "tars", samples=SAMPLES, archives=3)
    pack(root / "set", root / "pack", shuffle=False, shard_bytes=3000, verify=images.verify)
    return root


@pytest.fixture
def memory(built: Path) -> Iterator[str]:
    """Upload all of it to fsspec's memory file system; return its URL."""
    with uploaded(built) as url:
        yield url


@pytest.fixture
def no_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every request once, even on a busy machine, so that requests can be counted."""
    monkeypatch.setattr("penstock.cache.fetch.scheduler.Hedging.late_after_s", lambda *_: None)


@pytest.fixture(scope="module")
def indexed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy all of it, with indexes next to the data, as for an upload."""
    root = tmp_path_factory.mktemp("indexed")
    shutil.copytree(built, root / "all")
    for kind in ("set", "tars"):
        build_index(root / "all" / KINDS[kind], verify=images.verify)
    return root / "all"


@pytest.fixture(scope="module")
def bucket(indexed: Path) -> Iterator[Server]:
    """Serve all of it in the folder or bucket "all"."""
    with serving(indexed.parent) as found:
        yield found


@pytest.fixture(scope="module")
def server(indexed: Path) -> Iterator[Server]:
    with serving(indexed) as found:
        yield found


@pytest.fixture
def processes() -> Iterator[Executor]:
    """An executor of two processes."""
    with ProcessPoolExecutor(2) as pool:
        yield pool
