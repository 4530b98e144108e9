"""A loader fetches the remote chunks that its plan needs, with any cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock import DataLoader, Dataset
from penstock.cache import DiskCache
from tests.readers.formats import blocks
from tests.servers import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = tuple((400, 300, 500, 350) for _ in range(4))  # 8 shards, two of each file
ROWS = sum(map(sum, UNITS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = blocks.write(tmp_path_factory.mktemp("chunks") / "set", UNITS)
    with serving(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks.Blocks, "reader_class", blocks.ByParts)
    yield from blocks.install(monkeypatch)


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize(
    ("fields", "max_bytes"),
    [
        (("y",), 12_500),
        (blocks.FIELDS, 2**26),
        (blocks.FIELDS, None),
        pytest.param(("y",), 2**26, marks=pytest.mark.grid),
        pytest.param(("y",), None, marks=pytest.mark.grid),
        pytest.param(blocks.FIELDS, 12_500, marks=pytest.mark.grid),
        *(
            pytest.param(("x",), max_bytes, marks=pytest.mark.grid)
            for max_bytes in (2**26, 12_500, None)
        ),
    ],
)
def test_a_cold_epoch_fetches_each_byte_of_the_fields_once(
    server: Any, tmp_path: Path, fields: tuple[str, ...], max_bytes: int | None
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=max_bytes) if max_bytes else None
    with Dataset(server.url, fields=(*fields, "id"), cache=cache) as dataset:
        wanted = int(dataset.index.shard_bytes.sum())
        assert wanted == int(dataset.index.manifest.bytes_of(fields).sum())
        before = server.bytes_sent
        with DataLoader(
            dataset, batch_size=64, shuffle=True, seed=3, as_dict=True, drop_last=False
        ) as loader:
            seen = [i for batch in loader for i in batch["id"].tolist()]
        assert sorted(seen) == list(range(ROWS))
        assert server.bytes_sent - before <= 1.05 * wanted


def test_ids_alone_need_no_bytes_of_samples(server: Any, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=2**26)
    with Dataset(server.url, fields=("id",), cache=cache) as dataset:
        assert not dataset.index.shard_bytes.any()
        before = server.bytes_sent
        with DataLoader(dataset, batch_size=64, shuffle=True, seed=3) as loader:
            seen = [i for (ids,) in loader for i in ids.tolist()]
        assert sorted(seen) == list(range(ROWS))
        assert server.bytes_sent == before
