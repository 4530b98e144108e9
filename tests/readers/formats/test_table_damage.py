"""Damaged and hostile files of tables raise an error with their name, or make bad samples."""

from __future__ import annotations

import io
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cache import DatasetError, PenstockError
from penstock.readers import Dataset
from penstock.readers.formats.parquet import (
    MAX_FOOTER_BYTES,
    Long,
    ParquetFile,
    Raw,
    ThriftReader,
    as_file,
    write_struct,
)
from penstock.readers.origin import Entry
from tests.readers.formats.tables import jpeg, many_types

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STRUCT, LIST, TEXT = 12, 9, 8
ROOT = {4: b"schema", 5: 1}
LEAF = {1: 2, 3: 0, 4: b"x"}


def chunk(**changed: int) -> dict[int, Any]:
    """Return a column chunk. changed: numbers that differ from the valid ones."""
    numbers = {"type": 2, "codec": 0, "values": 4, "decoded": 40, "size": 40, "data": 4} | changed
    meta = {
        1: numbers["type"],
        2: [],
        3: [b"x"],
        4: numbers["codec"],
        5: Long(numbers["values"]),
        6: Long(numbers["decoded"]),
        7: Long(numbers["size"]),
        9: Long(numbers["data"]),
    }
    return {2: Long(4), 3: meta}


def footer(
    *,
    schema: Any = (ROOT, LEAF),
    columns: list[dict[int, Any]] | None = None,
    rows: int = 4,
    total: int | None = None,
    more: Mapping[int, Any] | None = None,
) -> bytes:
    """Return a footer with one row group."""
    own = [chunk()] if columns is None else columns
    group = {1: own, 2: Long(40), 3: Long(rows)}
    fields = {1: 2, 2: list(schema), 3: Long(rows if total is None else total), 4: [group]}
    return write_struct(fields | dict(more or {}))


def deep(levels: int) -> list[dict[int, Any]]:
    return [{4: b"g", 5: 1} for _ in range(levels)]


NESTED = write_struct({1: Raw(STRUCT, b"\x1c" * 200 + b"\0" * 200)})

HOSTILE: dict[str, tuple[bytes, str]] = {
    "rows": (footer(rows=10**12, columns=[chunk(values=10**12)]), r"1,000,000,000,000 rows"),
    "total": (footer(total=5), r"says 5 rows"),
    "outside": (footer(columns=[chunk(data=10**9)]), "would lie at bytes"),
    "negative": (footer(columns=[chunk(data=-4)]), "lack its offset"),
    "size": (footer(columns=[chunk(size=2**62)]), "would lie at bytes"),
    "values": (footer(columns=[chunk(values=2**40)]), "values for 4 rows"),
    "type": (footer(columns=[chunk(type=6)]), "another type"),
    "columns": (footer(columns=[chunk(), chunk()]), "2 columns, and its schema 1"),
    "children": (footer(schema=({4: b"s", 5: 2}, LEAF)), "ends early"),
    "spare": (footer(schema=(ROOT, LEAF, LEAF)), "in no group"),
    "deep": (footer(schema=[*deep(99), LEAF]), "nests deeper"),
    "nested": (NESTED, "nest deeper"),
    "list": (write_struct({2: Raw(LIST, b"\xfc\xff\xff\xff\xff\x0f")}), "more than it has bytes"),
    "text": (write_struct({6: Raw(TEXT, b"\xff\xff\xff\xff\x0f")}), "more than it has bytes"),
    "encrypted": (footer(more={8: {}}), "encrypted"),
    "nothing": (b"\0", "lacks the schema"),
    "name": (footer(schema=(ROOT, {1: 2, 4: b"\xff"})), "UTF-8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_footer_is_refused_by_name(root: Path, case: str) -> None:
    data, message = HOSTILE[case]
    (root / "bad.parquet").write_bytes(b"PAR1" + bytes(100) + as_file(data)[4:])
    with Dataset(root) as dataset, pytest.raises(DatasetError, match=rf"bad\.parquet: .*{message}"):
        dataset.open()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its last bytes aren't Parquet's"),
        (b"PAR1", "its last bytes aren't Parquet's"),
        (bytes(100), "its last bytes aren't Parquet's"),
        (bytes(100) + b"PARE", "encrypted"),
        (bytes(100) + (2**31 - 1).to_bytes(4, "little") + b"PAR1", "footer would have"),
        (bytes(MAX_FOOTER_BYTES + 99) + b"\1\0\0\1PAR1", "wanted at most"),
    ],
)
def test_a_file_that_isnt_parquet_is_refused_by_name(root: Path, data: bytes, message: str) -> None:
    pq.write_table(many_types(10), root / "a.parquet")
    (root / "bad.parquet").write_bytes(data)
    with Dataset(root) as dataset, pytest.raises(DatasetError, match=rf"bad\.parquet: .*{message}"):
        dataset.open()


def test_many_structs_of_one_byte_each_take_little_memory() -> None:
    count = 2**20
    head = b"\x19" + b"\xfc" + b"\x80\x80\x40"  # a list of 2^20 structs, each empty
    entry = Entry(name=b"a", size_bytes=2**30, mtime_ns=0, version="")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="too many for it"):
        ParquetFile(entry, head + bytes(count + 1), {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def write(kind: str, table: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=20, **options)
    else:
        make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        codec = options.get("compression")
        with make(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            for batch in table.to_batches(max_chunksize=20):
                writer.write_batch(batch)
    return file.getvalue()


def outcome(folder: Path, kind: str, data: bytes, trial: int) -> str:
    """Return the class of the error that a file raises, or "bad" or "good" for its samples."""
    root = folder / f"{kind}{trial}"
    root.mkdir()
    (root / f"bad.{'parquet' if kind == 'parquet' else 'arrow'}").write_bytes(data)
    try:
        with Dataset(root, format="parquet" if kind == "parquet" else "arrow") as dataset:
            bad: dict[int, str] = {}
            rows = dataset.rows(np.arange(min(len(dataset), 100)))
            dataset.read(rows, fields=list(dataset.index.schema), bad=bad)
            return "bad" if bad else "good"
    except PenstockError as error:
        return type(error).__name__


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_truncated_and_flipped_files_end_in_named_errors(tmp_path: Path, kind: str) -> None:
    compression = {"parquet": "snappy", "arrow": None, "stream": "zstd"}[kind]
    data = write(kind, many_types(60), compression=compression)
    rng = np.random.default_rng(5)
    found = []
    for trial in range(60):
        damaged = bytearray(data)
        if trial % 3 == 0:
            damaged = damaged[: rng.integers(len(data))]
        else:
            from_end = trial % 3 == 1
            for _ in range(3):
                at = int(rng.integers(min(3000, len(data)) if from_end else len(data)))
                damaged[-1 - at if from_end else at] ^= int(rng.integers(1, 256))
        found.append(outcome(tmp_path, kind, bytes(damaged), trial))
    assert set(found) <= {
        "good",
        "bad",
        "DatasetError",
        "CorruptShardError",
        "DatasetNotFoundError",
    }
    assert "DatasetError" in found


def test_checksums_of_pages_find_flipped_values(root: Path) -> None:
    table = pa.table({"x": np.arange(1000), "image": [jpeg(i, height=40) for i in range(10)] * 100})
    path = root / "a.parquet"
    pq.write_table(
        table,
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        row_group_size=500,
    )
    metadata = pq.read_metadata(path)
    with Dataset(root) as dataset:
        rows = dataset.rows(np.array([3, 700]))
        dataset.open()
        with path.open("r+b") as file:
            for column in range(2):
                chunk = metadata.row_group(1).column(column)
                file.seek(chunk.data_page_offset + chunk.total_compressed_size - 9)
                file.write(b"\x55\xaa")
        for field in ("x", "image"):
            bad: dict[int, str] = {}
            dataset.read(rows, fields=(field,), bad=bad)
            assert list(bad) == [1]
            assert field in bad[1]


@pytest.mark.parametrize("codec", ["gzip", "zstd", "snappy", "none"])
def test_pages_that_claim_too_much_memory_are_never_decompressed(root: Path, codec: str) -> None:
    """Nothing is allocated for a page whose header claims 2 GB."""
    file = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(1000)}), file, compression=codec, use_dictionary=False)
    data = file.getvalue()
    start = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0).data_page_offset
    page = ThriftReader(data, start).struct()
    own = {k: v for k, v in page[5].items() if type(v) is int}
    header: dict[int, Any] = {1: 0, 2: 2**31 - 1, 3: page[3], 5: own}
    spare = page.end - page.start - len(write_struct(header)) - 2
    header[9] = bytes(spare)  # an unknown field
    damaged = data[:start] + write_struct(header) + data[page.end :]
    assert len(damaged) == len(data)
    (root / "a.parquet").write_bytes(damaged)
    with Dataset(root) as dataset:
        bad: dict[int, str] = {}
        dataset.read(dataset.rows(np.arange(2)), bad=bad)
        assert sorted(bad) == [0, 1]
        assert "2,147,483,647" in bad[0]
