"""A pack's shard by itself: every type of field, as any Arrow tool reads it and as Penstock
does."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import Array, Image, Mask, MultiLabel, Schema, Value
from penstock.readers.files import BROKEN, map_buffer
from penstock.readers.formats import NO_SPAN, SampleLayout, Sums, sample_table
from penstock.readers.formats.pack import (
    PackColumns,
    PackRows,
    block_bounds,
    block_rows,
    pack_form,
    pack_forms,
    shard_batch,
    write_shard,
)
from tests.properties import examples
from tests.readers.formats.pack_contents import EVERY, content, stored_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.formats.pack import PackField, ShardContent

    Change = Callable[[dict[str, Any]], None]


LACKING = ("mask", "caption", "score", "label", "tags", "vector", "boxes", "spectrum", "is_new")


def written(path: Path, made: ShardContent) -> Any:
    """Write a shard, and read it with pyarrow alone."""
    write_shard(os.fsencode(path), made)
    with pa.ipc.open_file(path) as reader:
        assert reader.num_record_batches == 1
        table = reader.read_all()
    table.validate(full=True)
    return table


def opened(path: Path, schema: Schema = EVERY) -> PackColumns:
    return PackColumns(map_buffer(os.fsencode(path)), schema)


def wanted(made: ShardContent, name: str) -> list[Any]:
    """Return the plain Python values that an Arrow tool must read for a field."""
    form = pack_form(made.schema[name])
    found: list[Any] = []
    for sample in made.samples:
        value = sample.values.get(name)
        if value is None:
            found.append(None)
        elif form.kind == "bytes":
            data = bytes(value)
            found.append(data.decode() if form.arrow == pa.large_string() else data)
        else:
            found.append(as_stored(value, form))
    return found


def as_stored(value: NDArray[Any], form: Any) -> Any:
    array = np.asarray(value)
    shape = list(array.shape)
    if form.dtype.kind == "c":
        array = np.stack((array.real, array.imag), -1)
    if form.kind == "shaped":
        return {"values": array.reshape(-1).tolist(), "shape": shape}
    if form.kind == "ragged":
        is_flat = form.arrow.value_type.num_fields == 0
        return [each.item() if is_flat else each.reshape(-1).tolist() for each in array]
    if pa.types.is_fixed_size_list(form.arrow):
        array = array.reshape(-1)
    if form.is_bits:
        array = array.astype(bool)
    return array.tolist()


@pytest.mark.parametrize("lacking", [(), LACKING], ids=["whole", "with gaps"])
def test_any_arrow_tool_reads_every_field(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    made = content(lacking=lacking)
    table = written(tmp_path / "shard.arrow", made)
    for name in EVERY:
        assert table[name].to_pylist() == wanted(made, name), name
        assert (table[name].null_count > 0) == (name in lacking)
    assert table["penstock/source"].to_pylist() == made.source.tolist()
    assert table["penstock/name"].to_pylist() == made.names
    for name in ("image", "volume", "series", "spectrum"):
        crcs = [crc32c(each) for each in stored_values(made, name)]
        assert table[f"penstock/crc32c/{name}"].to_pylist() == crcs
    assert table["penstock/height/image"].to_pylist() == [4] * 9


def test_shapes_that_arrow_cant_express_are_in_the_metadata(tmp_path: Path) -> None:
    schema = written(tmp_path / "shard.arrow", content()).schema
    assert json.loads(schema.field("volume").metadata[b"penstock.shape"]) == [3, 4, 5]
    assert schema.field("vector").metadata is None
    assert Schema.from_json(json.loads(schema.metadata[b"penstock.schema"])) == EVERY
    values = schema.field("volume")
    assert values.type == pa.list_(pa.float16(), 60)


def test_no_field_can_hide_a_column_of_penstock(tmp_path: Path) -> None:
    own = [name for name in written(tmp_path / "s", content()).schema.names if name not in EVERY]
    assert own
    assert all("/" in name for name in own)
    for name in own:
        with pytest.raises(ConfigError, match="slash"):
            Schema({name: Value("int8")})


def test_many_class_names_are_left_to_the_manifest(tmp_path: Path) -> None:
    names = tuple(f"class {number}" for number in range(5000))
    schema = Schema({"tags": MultiLabel(names)})
    metadata = written(tmp_path / "s", content(schema)).schema.metadata
    assert len(metadata[b"penstock.schema"]) < 100


def span(data: NDArray[np.uint8], field: PackField, row: int) -> NDArray[np.uint8]:
    return data[field.starts[row] :][: field.sizes[row]]


@pytest.mark.parametrize("lacking", [(), LACKING], ids=["whole", "with gaps"])
def test_a_written_shard_is_read_back(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    path = tmp_path / "shard.arrow"
    made = content(lacking=lacking, samples=20)
    write_shard(os.fsencode(path), made)
    columns, data = opened(path), np.frombuffer(path.read_bytes(), np.uint8)
    for name, field in columns.fields().items():
        there = field.present if field.present is not None else np.ones(20, bool)
        assert there.tolist() == [name in sample.values for sample in made.samples]
        if not field.form.is_span:
            continue
        assert field.crcs is not None
        for row in np.flatnonzero(there).tolist():
            found = span(data, field, row)
            assert crc32c(found) == field.crcs[row]
            if field.form.kind != "bytes":
                assert field.shapes is not None
                found = found.view(field.form.dtype).reshape(field.shapes[row])
            assert np.array_equal(found, made.samples[row].values[name])
    assert columns.source_names() == made.names
    codecs = ["png" if "mask" in sample.values else "" for sample in made.samples]
    assert columns.codecs("mask") == codecs
    assert data[columns.source_offset() :][:8].view("<i8").tolist() == [100]


def test_fields_that_changed_since_the_manifest_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.arrow"
    summary = write_shard(os.fsencode(path), content())
    storage = {name: form.storage for name, form in pack_forms(EVERY).items()}
    layout, columns = SampleLayout(schema=EVERY, storage=storage), opened(path)
    crcs = columns.promised(layout, samples=9, sums=summary.sums)["image"].crcs
    assert crcs is not None
    at = path.read_bytes().index(crcs.tobytes())
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([crcs.tobytes()[0] ^ 1]))
    with pytest.raises(ValueError, match="checksums of its columns aren't"):
        columns.promised(layout, samples=9, sums=summary.sums)


def test_the_table_of_a_shard_locates_samples(tmp_path: Path) -> None:
    path = tmp_path / "shard.arrow"
    made = content(lacking=LACKING)
    summary = write_shard(os.fsencode(path), made)
    storage = {name: form.storage for name, form in pack_forms(EVERY).items()}
    layout = SampleLayout(schema=EVERY, storage=storage, lacking=frozenset(LACKING))
    fields = opened(path).promised(layout, samples=9, sums=summary.sums)
    table = sample_table(layout, fields, samples=9)
    data, columns = np.frombuffer(path.read_bytes(), np.uint8), layout.table
    for name, place in columns.spans.items():
        there = np.array([name in sample.values for sample in made.samples])
        assert (table[~there, place.start : place.end + 1] == NO_SPAN).all()
        for row in np.flatnonzero(there).tolist():
            found = data[table[row, place.start] : table[row, place.end]]
            assert crc32c(found) == table[row, place.crc]
    image, boxes = columns.spans["image"], columns.spans["boxes"]
    assert image.height is not None
    assert boxes.lengths is not None
    assert table[0, image.height : image.height + 2].tolist() == [4, 5]
    shape = list(made.samples[0].values["boxes"].shape)
    assert table[0, boxes.lengths : boxes.lengths + 2].tolist() == shape
    labels = [int(value) for value in stored_values(made, "label")]
    assert table[:, columns.values["label"]].tolist() == labels
    has = ["vector" in sample.values for sample in made.samples]
    assert table[:, columns.present["vector"]].tolist() == has


def test_rows_are_gathered_directly_into_a_batch(tmp_path: Path) -> None:
    schema, path = Schema({"x": Array("float32", (5, 7))}), tmp_path / "shard.arrow"
    made = content(schema, samples=30)
    write_shard(os.fsencode(path), made)
    values = np.stack(stored_values(made, "x"))
    dense = PackRows(opened(path, schema).fields()["x"])
    rows = np.array([7, 29, 7, 0])
    for places in (np.arange(4), np.array([3, 0, 2, 1])):
        out = np.full((4, 5, 7), 9, np.float32)
        dense.put(rows, out, places)
        assert np.array_equal(out[places], values[rows])
    out = np.full((6, 5, 7), 9, np.float32)
    dense.put(rows, out, np.array([1, 2, 4, 5]))
    assert (out[[0, 3]] == 9).all()
    large = Schema({"x": Array("float32", (3, 32, 32))})
    more = content(large, samples=30)
    write_shard(os.fsencode(path), more)
    rows, places = np.arange(30)[::-1] // 2, np.random.default_rng(0).permutation(30)
    found = np.empty((30, 3, 32, 32), np.float32)
    PackRows(opened(path, large).fields()["x"]).put(rows, found, places)
    assert np.array_equal(found[places], np.stack(stored_values(more, "x"))[rows])
    rows = np.array([7, 29, 7, 0])
    turned = np.full((7, 5, 4), 9, np.float32).T
    dense.put(rows, turned, np.arange(4))
    assert np.array_equal(turned, values[rows])


DENSE = {name: type for name, type in EVERY.items() if pack_form(type).kind == "dense"}


@pytest.mark.parametrize("lacking", [(), LACKING], ids=["whole", "with gaps"])
@pytest.mark.parametrize("name", DENSE)
def test_rows_of_one_shape_are_gathered(
    tmp_path: Path, name: str, lacking: tuple[str, ...]
) -> None:
    path = tmp_path / "shard.arrow"
    made = content(lacking=lacking)
    write_shard(os.fsencode(path), made)
    dense = PackRows(opened(path).fields()[name])
    values = np.stack(stored_values(made, name))
    rows = np.array([3, 1, 8, 1])
    assert dense.wrong(rows) is None
    found = np.stack(list(dense.each(rows)))
    assert found.dtype == values.dtype
    assert np.array_equal(found, values[rows])


@pytest.mark.parametrize(
    ("type", "samples"), [(Array("uint8", (4096,)), 700), (Array("bool", (100_001,)), 250)]
)
def test_only_the_rows_of_a_wrong_block_are_wrong(
    tmp_path: Path, type: Array, samples: int
) -> None:
    schema, path = Schema({"x": type}), tmp_path / "shard.arrow"
    write_shard(os.fsencode(path), content(schema, samples=samples))
    field = opened(path, schema).fields()["x"]
    each, form = block_rows(field.form), pack_form(type)
    bounds = block_bounds(form, samples)
    assert len(bounds) == -(-samples // each) + 1 > 3
    assert 2**19 < np.diff(bounds)[:-1].max() <= 2**20
    data = bytearray(path.read_bytes())
    data[field.start + int(bounds[1]) + 5] ^= 1
    path.unlink()
    path.write_bytes(data)
    dense = PackRows(opened(path, schema).fields()["x"])
    assert dense.wrong(np.array([0, each - 1, 2 * each, samples - 1])) is None
    wrong = dense.wrong(np.array([each, 0, 2 * each - 1]))
    assert wrong is not None
    assert wrong.tolist() == [True, False, True]
    assert dense.wrong(np.array([0])) is None


def test_a_block_is_checked_once(tmp_path: Path) -> None:
    schema, path = Schema({"x": Array("uint8", (4096,))}), tmp_path / "shard.arrow"
    write_shard(os.fsencode(path), content(schema, samples=700))
    columns = opened(path, schema)
    field = columns.fields()["x"]
    dense = PackRows(field)
    assert dense.wrong(np.arange(700)) is None
    data = np.memmap(path, np.uint8, "r+", offset=0)
    data[field.start] ^= 1
    assert dense.wrong(np.arange(700)) is None
    assert PackRows(field).wrong(np.arange(2)) is not None


def test_a_field_without_a_settled_type_raises_an_error_with_its_name() -> None:
    with pytest.raises(ConfigError, match='"x": got the type'):
        pack_forms(Schema({"x": Array()}))
    with pytest.raises(ConfigError, match="numbers"):
        pack_form(Array("uint8", (2**20, 2**20)))


def test_a_missing_mask_leaves_its_image_alone(tmp_path: Path) -> None:
    schema = Schema({"image": Image(), "mask": Mask("image")})
    path = tmp_path / "shard.arrow"
    write_shard(os.fsencode(path), content(schema, lacking=("mask",)))
    found = opened(path, schema).fields()
    assert found["image"].present is None
    assert found["mask"].shapes is not None
    assert found["mask"].shapes[1].tolist() == [0, 0, 0]


ABSENT = ("caption", "score", "vector", "boxes", "spectrum")


BATCH = shard_batch(content(lacking=ABSENT))[0]


N = len(BATCH)


def read(buffer: Any) -> None:
    """Read everything of a shard, values included."""
    columns = PackColumns(buffer, EVERY)
    data = np.frombuffer(buffer, np.uint8)
    fields = columns.fields()
    columns.source_names()
    columns.source_offset()
    columns.codecs("image")
    for field in fields.values():
        if field.form.is_span:
            assert field.starts.min() >= 0
            assert (field.starts + field.sizes).max() <= len(data)
            for row in range(N) if field.form.kind != "bytes" else ():
                if field.present is None or field.present[row]:
                    assert field.shapes is not None
                    found = span(data, field, row)
                    found.view(field.form.dtype).reshape(field.shapes[row])
        elif field.form.kind == "dense":
            dense = PackRows(field)
            dense.wrong(np.arange(N))
            assert np.stack(list(dense.each(np.arange(N)))).shape == (N, *field.form.row)


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
    """Return the fields for a manifest with these changes."""
    default = {"storage": STORAGE, "lacking": frozenset(ABSENT), "samples": N}
    changed: dict[str, Any] = {**default, **changes}
    layout = SampleLayout(schema=EVERY, storage=changed["storage"], lacking=changed["lacking"])
    sums = changed.get("sums", Sums.of(columns.fields()))
    return columns.promised(layout, samples=changed["samples"], sums=sums)


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
    assert len(promised(columns)) == len(EVERY)
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


@examples(200)
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
