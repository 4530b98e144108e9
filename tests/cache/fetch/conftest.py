"""Fixtures of the tests of the fetcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cache.fetch.served import content
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "bucket" / "set"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.bin").write_bytes(content(number))
    with serving(tmp_path) as server:
        yield server
