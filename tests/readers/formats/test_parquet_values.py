"""The decoding of Parquet's pages: large values without a copy, and other writers' files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.readers import Dataset
from penstock.readers.formats.parquet import parquet_chunks
from tests.readers.formats.tables import plain

FILES = Path(__file__).with_name("parquet_files")
LARGE: dict[str, dict[str, Any]] = {
    "dictionary, then plain": {"dictionary_pagesize_limit": 40_000},
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "version 2": {"data_page_version": "2.0", "dictionary_pagesize_limit": 40_000},
    "pages": {"data_page_size": 2000, "write_batch_size": 3, "use_dictionary": False},
}


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("kind", LARGE)
def test_large_values_are_views_of_their_pages(
    root: Path, kind: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    values = [rng.bytes(int(n)) for n in rng.integers(0, 9000, 60)] + [b"", b"short", bytes(12)] * 4
    picked = [values[i] for i in rng.integers(0, len(values), 150)]
    required = pa.schema([pa.field("a", pa.binary()), pa.field("b", pa.binary(), nullable=False)])
    pq.write_table(
        pa.table({"a": picked, "b": picked[::-1]}, required),
        root / "a.parquet",
        compression=codec,
        row_group_size=70,
        write_page_checksum=True,
        **LARGE[kind],
    )
    calls: list[int] = []
    plain_values = parquet_chunks.plain_values

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return plain_values(*args, **options)

    monkeypatch.setattr(parquet_chunks, "plain_values", counted)
    with Dataset(root) as dataset:
        batch = dataset.read(dataset.rows(np.arange(150)), fields=("a", "b"))
        assert plain(batch.columns["a"]) == picked
        assert plain(batch.columns["b"]) == picked[::-1]
        batch = dataset.read(dataset.rows(np.array([149, 2])), fields=("a",))  # copies
        assert plain(batch.columns["a"]) == [picked[149], picked[2]]
    assert calls


def runs(width: int) -> st.SearchStrategy[Any]:
    run = st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 2**width - 1))
    return st.tuples(st.just(width), st.lists(run, max_size=8))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12).flatmap(runs))
def test_dictionary_indices_are_unpacked(case: tuple[int, list[tuple[bool, int, int]]]) -> None:
    width, runs_of_case = case
    body, wanted = bytearray([width]), []
    for is_packed, count, first in runs_of_case:
        if is_packed:
            places = [(first + k) % 2**width for k in range(8 * count)]
            bits = sum(place << (k * width) for k, place in enumerate(places))
            body += bytes([count << 1 | 1]) + bits.to_bytes(count * width, "little")
        else:
            places = [first] * count
            body += bytes([count << 1]) + first.to_bytes((width + 7) // 8, "little")
        wanted += places
    found = parquet_chunks.read_indices(np.frombuffer(bytes(body), np.uint8), 0, len(wanted))
    assert found.tolist() == wanted
    with pytest.raises(ValueError, match=r"end early|empty run"):
        parquet_chunks.read_indices(np.frombuffer(bytes(body), np.uint8), 0, len(wanted) + 9)


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
def test_files_of_other_writers_are_read(root: Path, name: str) -> None:
    """The files were written by fastparquet (gzip, two row groups), polars and duckdb."""
    shutil.copy(FILES / name, root / name)
    with Dataset(root) as dataset:
        fields = list(dataset.index.schema)
        batch = dataset.read(dataset.rows(np.array([4, 0, 1, 3, 2])), fields=fields)
        assert plain(batch.columns["x"]) == [5, 1, 2, 4, 3]
        assert plain(batch.columns["y"]) == [4.5, 0.5, 1.5, 3.5, 2.5]
        assert plain(batch.columns["t"]) == [b"a", b"a", "bé".encode(), b"dd", b""]
        if "l" in fields:
            assert plain(batch.columns["l"]) == [[5, 6, 7], [1], [], [4], [2, 3]]
