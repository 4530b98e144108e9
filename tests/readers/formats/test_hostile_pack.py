"""Forged shards of packs: wrong offsets, lengths, list sizes, types or metadata.

Each raises an error before anything is read by them.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.readers.files import BROKEN, map_buffer
from penstock.readers.formats import SampleLayout, Sums
from penstock.readers.formats.pack import DenseRows, PackColumns, pack_forms, shard_batch
from tests.readers.formats.pack_contents import EVERY, content

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[dict[str, Any]], None]

LACKING = ("caption", "score", "vector", "boxes", "spectrum")
BATCH, _ = shard_batch(content(lacking=LACKING))
N = len(BATCH)


def read(buffer: Any) -> None:
    """Read everything of a shard, values included."""
    columns = PackColumns(buffer, EVERY)
    data = np.frombuffer(buffer, np.uint8)
    fields = columns.fields
    columns.source_names()
    columns.source()
    columns.codecs("image")
    for field in fields.values():
        if field.bounds is not None:
            assert field.bounds[0] >= 0
            assert field.bounds[-1] <= len(data)
            for row in range(N):
                found = data[field.bounds[row] : field.bounds[row + 1]]
                if field.form.kind != "bytes":
                    assert field.shapes is not None
                    found.view(field.form.dtype).reshape(field.shapes[row])
        elif field.form.kind == "dense":
            dense = DenseRows(field)
            dense.wrong(np.arange(N))
            assert dense.take(np.arange(N)).shape == (N, *field.form.row)


def forged(
    path: Path, change: Change, *, metadata: dict[bytes, bytes] | None = None, **options: Any
) -> Any:
    columns = {name: BATCH.column(name) for name in BATCH.schema.names}
    change(columns)
    changed = {**BATCH.schema.metadata, **(metadata or {})}
    batch = pa.record_batch(columns).replace_schema_metadata(changed)
    with pa.OSFile(str(path), "wb") as sink:
        writer = pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options))
        with writer:
            writer.write_batch(batch)
    return map_buffer(os.fsencode(path))


def shapes(name: str, row: int, value: list[int]) -> Change:
    """Put a wrong shape into a column of arrays that differ in all their lengths."""

    def change(columns: dict[str, Any]) -> None:
        array = columns[name]
        dims = np.array(array.field("shape").values.to_numpy()).reshape(N, -1)
        dims[row] = value
        fresh = pa.FixedSizeListArray.from_arrays(pa.array(dims.reshape(-1)), dims.shape[1])
        columns[name] = pa.Array.from_buffers(
            array.type, N, [None], children=[array.field("values"), fresh]
        )

    return change


def put(name: str, value: Any) -> Change:
    """Set a column's first value."""

    def change(columns: dict[str, Any]) -> None:
        values = columns[name].to_pylist()
        columns[name] = pa.array([value, *values[1:]], columns[name].type)

    return change


def typed(name: str, type: Any) -> Change:
    return lambda columns: columns.update({name: pa.nulls(N, type)})


def holes(name: str) -> Change:
    """Put nulls into a field's lists."""

    def change(columns: dict[str, Any]) -> None:
        array = columns[name]
        inner = pa.array([None] * len(array.values), array.values.type)
        columns[name] = pa.Array.from_buffers(array.type, N, [None], children=[inner])

    return change


def renamed(old: str, new: str) -> Change:
    def change(columns: dict[str, Any]) -> None:
        columns[new] = columns.pop(old)

    return change


FORGERIES: dict[str, Change] = {
    "a shape of other numbers": shapes("spectrum", 0, [7, 7]),
    "a shape below 0": shapes("spectrum", 0, [-1, -6]),
    "a shape whose product wraps around": shapes("spectrum", 0, [2**33, 2**31]),
    "a shape that numpy can't reshape to": shapes("spectrum", 1, [0, 2**62]),
    "a fixed length of another value": shapes("cube", 0, [1, 3, 0]),
    "a list of another size": typed("vector", pa.list_(pa.float32(), 63)),
    "a list of another dtype": typed("vector", pa.list_(pa.float64(), 64)),
    "a list of any length": typed("vector", pa.list_(pa.float32())),
    "short lists": typed("tokens", pa.list_(pa.int32())),
    "boxes of three": typed("boxes", pa.large_list(pa.list_(pa.float32(), 3))),
    "text for bytes": typed("raw", pa.large_string()),
    "views for bytes": typed("raw", pa.binary_view()),
    "a label of 32 bits": typed("label", pa.int32()),
    "a struct of other names": typed(
        "spectrum",
        pa.struct({"numbers": pa.large_list(pa.float32()), "shape": pa.list_(pa.int64(), 2)}),
    ),
    "a dictionary": lambda columns: columns.update(caption=pa.array(["x"] * N).dictionary_encode()),
    "holes in a list": holes("vector"),
    "holes in a ragged list": lambda columns: columns.update(
        tokens=pa.array([[None]] * N, pa.large_list(pa.int32()))
    ),
    "a checksum that is missing": put("penstock/crc32c/image", None),
    "a height of 0": put("penstock/height/image", 0),
    "a width below 0": put("penstock/width/mask", -1),
    "a height of too many": put("penstock/height/image", 2**30),
    "an image of no bytes": put("image", b""),
    "no field": lambda columns: columns.pop("scalar"),
    "another field": lambda columns: columns.update(more=columns["label"]),
    "no checksums": lambda columns: columns.pop("penstock/crc32c/boxes"),
    "a field of another name": renamed("label", "labels"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_shard_is_rejected(tmp_path: Path, forgery: str) -> None:
    buffer = forged(tmp_path / "shard.arrow", FORGERIES[forgery])
    with pytest.raises(BROKEN):
        read(buffer)


@pytest.mark.parametrize(
    ("at", "value"), [(0, -1), (1, -(2**40)), (1, 2**62), (N, 2**40), (N, -(2**63))]
)
@pytest.mark.parametrize(
    "name", ["image", "caption", "raw", "boxes", "tokens", "series", "flags", "spectrum"]
)
def test_offsets_that_lead_anywhere_are_refused(
    tmp_path: Path, name: str, at: int, value: int
) -> None:
    """The offsets are written into the file's bytes, because pyarrow refuses to write them."""
    path = tmp_path / "shard.arrow"
    buffer = forged(path, lambda _: None)
    column = pa.ipc.open_file(pa.BufferReader(buffer)).get_batch(0).column(name)
    lists = column.field("values") if pa.types.is_struct(column.type) else column
    place = lists.buffers()[1].address - buffer.address + 8 * at
    data = bytearray(path.read_bytes())
    data[place : place + 8] = value.to_bytes(8, "little", signed=True)
    with pytest.raises(BROKEN):
        read(pa.py_buffer(bytes(data)))


STORAGE = {name: form.storage for name, form in pack_forms(EVERY).items()}


def promised(columns: PackColumns, **changes: Any) -> Any:
    """Return the table for a manifest with these changes."""
    notes = {name: field.notes() for name, field in columns.fields.items()}
    default = {"storage": STORAGE, "lacking": frozenset(LACKING), "samples": N}
    changed: dict[str, Any] = {**default, **changes}
    layout = SampleLayout(schema=EVERY, storage=changed["storage"], lacking=changed["lacking"])
    return columns.table(
        layout, samples=changed["samples"], sums=changed.get("sums", Sums.of(notes))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": N + 1}, "samples"),
        ({"lacking": frozenset()}, "lack"),
        ({"storage": STORAGE | {"image": "rows"}}, "'image' isn't stored"),
        ({"storage": STORAGE | {"vector": "span"}}, "'vector' isn't stored"),
        ({"storage": STORAGE | {"label": "rows"}}, "'label' isn't stored"),
        ({"sums": Sums(1, 2)}, "checksums of its columns aren't"),
    ],
)
def test_a_manifest_that_promises_something_else_is_rejected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    columns = PackColumns(forged(tmp_path / "shard.arrow", lambda _: None), EVERY)
    assert len(promised(columns)) == N
    with pytest.raises(ValueError, match=message):
        promised(columns, **changes)


@pytest.mark.parametrize(
    "sums",
    [
        b"",
        b"[]",
        b"{}",
        b'{"vector": 7}',
        b'{"vector": "00"}',
        b'{"vector": "zz"}',
        b'{"vector": "0000000000000000"}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_invalid_checksums_of_blocks_are_rejected(tmp_path: Path, sums: bytes) -> None:
    metadata = {b"penstock.blocks.crc32c": sums}
    buffer = forged(tmp_path / "shard.arrow", lambda _: None, metadata=metadata)
    with pytest.raises(BROKEN):
        read(buffer)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compressed"):
        read(forged(tmp_path / "shard.arrow", lambda _: None, compression="zstd"))


def test_a_shard_as_it_was_written_is_read(tmp_path: Path) -> None:
    read(forged(tmp_path / "shard.arrow", lambda _: None))


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), min_size=1, max_size=5),
    is_head=st.booleans(),
)
def test_any_bytes_at_head_or_tail_yield_samples_or_an_error(
    changes: list[tuple[int, int]], is_head: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("forged") / "shard.arrow"
    forged(path, lambda _: None)
    data = bytearray(path.read_bytes())
    for at, value in changes:
        data[at if is_head else -1 - at] = value
    with contextlib.suppress(*BROKEN):
        read(pa.py_buffer(bytes(data)))
