"""Hostile manifests, sidecars and shards with valid checksums: each raises one DatasetError, at
once and in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import DatasetError
from penstock.readers import Dataset, open_index, pack
from penstock.readers.formats import sidecar_etag
from penstock.readers.index import COLUMNS, read_manifest, write_manifest
from tests import images
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SUMMED = ("bytes", "samples", "files", "crc32c", "columns_crc32c")
CPU_S, RSS_BYTES = 1.0, 200 * 2**20


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of 12 samples in three shards."""
    root = tmp_path_factory.mktemp("hostile")
    images.class_folder(root / "set", samples=12)
    pack(root / "set", root / "pack", shard_bytes=3000, verify=images.verify)
    assert len(open_index(root / "pack").sizes) > 2
    return root / "pack"


def columns_of(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the header and the columns of a manifest."""
    batch = pa.ipc.open_file(path).get_batch(0)
    about = json.loads(batch.schema.metadata[b"penstock"])
    return about, {name: batch.column(name).to_pylist() for name in batch.schema.names}


def write(path: Path, batch: Any, options: Any) -> None:
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema, options=options) as writer,
    ):
        writer.write_batch(batch)


def forge(
    path: Path,
    about: Any,
    columns: Mapping[str, Any],
    *,
    text: bytes | None = None,
    options: Any = None,
) -> None:
    """Write a manifest with any content and a valid checksum."""
    kinds = {name: getattr(pa, kind)() for name, kind in COLUMNS.items()}
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values, kinds[name])
        for name, values in columns.items()
    }
    text = json.dumps(about, sort_keys=True).encode() if text is None else text
    total = crc32c(text)
    for name in SUMMED:
        if name in columns and pa.types.is_integer(arrays[name].type):
            total = crc32c(arrays[name].fill_null(0).to_numpy().tobytes(), total)
    for name in ("uri", "etag", "units"):
        values = arrays[name].to_pylist() if name in arrays and len(arrays[name]) < 10**6 else []
        plain = [v.encode() if isinstance(v, str) else v or b"" for v in values]
        total = crc32c(b"\0".join(plain), total)
    batch = pa.record_batch(arrays).replace_schema_metadata(
        {b"penstock": text, b"penstock.crc32c": f"{total:08x}".encode()}
    )
    write(path, batch, options)


def everything(root: Path) -> int:
    with Dataset(root) as dataset:
        index = dataset.index
        rows = [(s, r) for s, n in enumerate(index.sizes.tolist()) for r in range(n)]
        dataset.names(range(len(dataset)))
        return len(dataset.read(np.array(rows, np.int64)).columns["image"])


def is_refused(root: Path) -> str:
    """Return the one-line message of the error that opening a dataset raises."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(DatasetError) as report:
        everything(root)
    assert time.process_time() - began < CPU_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) * 1024 < RSS_BYTES
    assert "\n" not in str(report.value)
    assert "\0" not in str(report.value)
    assert len(str(report.value)) < 2000
    return str(report.value)


def one(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, list[Any]]], None]:
    """Return a change of a column: it sets the first shard's value."""

    def change(about: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        columns[name][0] = value
        about["samples"] = sum(columns["samples"])

    return change


def says(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, list[Any]]], None]:
    """Return a change of the header."""
    return lambda about, _: about.__setitem__(name, value)


def field(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, list[Any]]], None]:
    """Return a change of the summary of the images."""
    return lambda about, _: about["fields"]["image"].__setitem__(name, value)


def label(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, list[Any]]], None]:
    """Return a change of the labels in the schema."""
    return lambda about, _: about["schema"][1].__setitem__(name, value)


def shards(count: int, samples: int) -> Callable[[dict[str, Any], dict[str, list[Any]]], None]:
    """Return a change that makes a number of shards of a number of samples."""

    def change(about: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        for name in columns:
            columns[name][:] = [columns[name][0]] * count
        columns["uri"][:] = [b"shard-%06d.arrow" % i for i in range(count)]
        columns["samples"][:] = [samples] * count
        columns["bytes"][:] = [min(samples * 1000, 2**50)] * count
        about["samples"] = count * samples

    return change


HOSTILE = {
    "10^9 samples in one shard": one("samples", 10**9),
    "10^9 samples and as many bytes": shards(1, 10**9),
    "10^12 samples in all": shards(70_000, 2**24),
    "16 million samples in a small file": shards(1, 2**24),
    "more samples than bytes": one("samples", 10**6),
    "no shards": shards(0, 0),
    "no samples": one("samples", 0),
    "fewer than no samples": one("samples", -1),
    "samples that overflow": shards(9, 2**62),
    "fewer than no bytes": one("bytes", -5),
    "no bytes": one("bytes", 0),
    "no files": one("files", 0),
    "decode units of other samples": one("units", b"\1\0\0\0"),
    "decode units in part": one("units", b"\1\0"),
    "an empty decode unit": one("units", bytes(4)),
    "bytes that overflow": one("bytes", 2**63 - 1),
    "a sum that isn't the shards'": says("samples", 10**12),
    "a name with NUL": one("uri", b"shard\0.arrow"),
    "an absolute name": one("uri", b"/etc/passwd"),
    "a name that leaves": one("uri", b"../pack/shard-000000.arrow"),
    "a name that leaves inside": one("uri", b"a/../../pack/shard-000000.arrow"),
    "a name that ends in ..": one("uri", b"a/.."),
    "an empty name": one("uri", b""),
    "a long name": one("uri", b"x" * 10**7),
    "names alike": one("uri", b"shard-000001.arrow"),
    "a name of nothing": one("uri", b"shard-999999.arrow"),
    "a name with an escape": one("uri", b"\x1b[31mshard\n-000000.arrow"),
    "icc of NaN": says("icc", float("nan")),
    "icc of infinity": says("icc", float("inf")),
    "icc above 1": says("icc", 10**9),
    "icc of text": says("icc", "0.5"),
    "icc of a truth": says("icc", True),
    "no images": field("images", None),
    "images of text": field("images", {"min_height": "1"}),
    "images below 1": field(
        "images", {"min_height": 0, "max_height": -1, "min_width": 1, "max_width": 1}
    ),
    "images upside down": field(
        "images", {"min_height": 9, "max_height": 1, "min_width": 1, "max_width": 1}
    ),
    "images of light years": field(
        "images", {"min_height": 1, "max_height": 10**18, "min_width": 1, "max_width": 1}
    ),
    "images of fractions": field(
        "images", {"min_height": 1, "max_height": 2.5, "min_width": 1, "max_width": 1}
    ),
    "images stored as numbers": field("storage", "value"),
    "images stored nowhere": field("storage", "nowhere"),
    "more images missing than there are samples": field("missing", 10**6),
    "lengths below nothing": field("lengths", [[-1, 2]]),
    "bounds of a thousand digits": field("bounds", [0, 10**1000]),
    "codecs of numbers": field("codecs", [7]),
    "a field's surprise": field("surprise", 1),
    "a kind that nobody can know": says("kind", "zip/7"),
    "a kind of no name": says("kind", ["pack"]),
    "fields of others": lambda about, _: about["fields"].__setitem__("__class__", {}),
    "fields of text": says("fields", "image"),
    "no schema": says("schema", []),
    "a schema of text": says("schema", "image"),
    "a field twice": lambda about, _: about["schema"].append(about["schema"][0]),
    "a type that nobody can know": label("kind", "zip/7"),
    "an array of no dtype": lambda about, _: about["schema"].__setitem__(
        1, {"name": "label", "kind": "array", "dtype": "auto"}
    ),
    "a mask of nothing": lambda about, _: about["schema"].append(
        {"name": "mask", "kind": "mask", "of": "photo"}
    ),
    "classes of numbers": label("names", [1, 2]),
    "classes alike": label("names", ["a", "a"]),
    "a class of 10 MB": label("names", ["a" * 10**7]),
    "10^7 classes": label("names", [""] * 10**7),
    "a fingerprint of paths": says("fingerprint", "../../x"),
    "a seed of text": says("seed", "7"),
    "a seed of a thousand digits": says("seed", 10**1000),
    "shuffled by text": says("shuffled", "no"),
    "a source of numbers": says("source", 7),
    "directories of numbers": says("directories", [1, 2]),
    "directories of the far future": says("directories", [["a", 2**80]]),
    "counts of text": says("passed_over", {"txt": "many"}),
    "less than none quarantined": says("quarantined", -1),
    "something that nobody knows": says("surprise", 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(packed: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    about, columns = columns_of(path)
    HOSTILE[name](about, columns)
    forge(path, about, columns)
    assert str(tmp_path / "pack") in is_refused(tmp_path / "pack")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{" * 10**6,
        b"[" * 10**5,
        b'{"version": 1}',
        b'{"version": "x"}',
        b'{"version": {}}',
        b'{"version": 1e999}',
        b'{"version": ' + b"9" * 5000 + b"}",
        b'{"version": [' + b"[]," * 3 * 10**6 + b"[]]}",
        b'{"a": "' + b"x" * 65 * 2**20 + b'"}',
        b"\xff\xfe",
    ],
    ids=range(13),
)
def test_hostile_json_is_refused(packed: Path, tmp_path: Path, text: bytes) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    _, columns = columns_of(path)
    forge(path, None, columns, text=text)
    is_refused(tmp_path / "pack")


def test_columns_of_other_types_are_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    about, columns = columns_of(path)
    rows = len(columns["uri"])
    others: dict[str, list[pa.Array]] = {
        "uri": [pa.array(["x"] * rows), pa.nulls(rows), pa.nulls(10**6), pa.array([None] * rows)],
        "etag": [
            pa.array([b"x"] * rows),
            pa.nulls(rows),
            pa.array([""] * rows).dictionary_encode(),
        ],
        "samples": [
            pa.array([4.0] * rows),
            pa.array([4] * rows, pa.int32()),
            pa.array([4] * rows, pa.uint64()),
            pa.array([None, *[4] * (rows - 1)], pa.int64()),
        ],
        "bytes": [pa.array(["9"] * rows), pa.array([[9]] * rows)],
        "crc32c": [pa.array([1] * rows, pa.int64())],
    }
    for name, arrays in others.items():
        for array in arrays:
            some = {
                key: values if len(array) == rows else pa.nulls(len(array))
                for key, values in columns.items()
            }
            forge(path, about, some | {name: array})
            is_refused(tmp_path / "pack")
        forge(path, about, {key: v for key, v in columns.items() if key != name})
        is_refused(tmp_path / "pack")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_manifest_is_refused_before_it_is_unpacked(
    packed: Path, tmp_path: Path, codec: str
) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    about, columns = columns_of(path)
    shards(1, 4)(about, columns)
    columns["uri"] = [bytes(10**8)]
    forge(path, about, columns, options=pa.ipc.IpcWriteOptions(compression=codec))
    assert path.stat().st_size < 10**7
    assert "compressed" in is_refused(tmp_path / "pack")


def test_a_manifest_that_isnt_a_file_is_ignored_or_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    path.unlink()
    os.mkfifo(path)
    is_refused(tmp_path / "pack")


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 1, 4, 2**24, 2**50]))


@examples(150)
@given(data=st.data())
def test_any_manifest_gives_samples_or_an_error(
    packed: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "forged"
    if not root.exists():
        shutil.copytree(packed, root)
    path = root / "_penstock" / "manifest.arrow"
    about, columns = columns_of(packed / "_penstock" / "manifest.arrow")
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            about[data.draw(st.sampled_from(sorted(about)))] = data.draw(values)
            continue
        name = data.draw(st.sampled_from(sorted(columns)))
        row = data.draw(st.integers(0, len(columns[name]) - 1))
        columns[name][row] = data.draw(
            {
                "uri": st.binary(max_size=30),
                "units": st.binary(max_size=30),
                "etag": st.text(max_size=8),
                "crc32c": st.integers(0, 2**32 - 1),
                "columns_crc32c": st.integers(0, 2**32 - 1),
            }.get(name, numbers)
        )
    forge(path, about, columns)
    with contextlib.suppress(DatasetError):  # any other one fails
        assert everything(root) == 12


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder of 4 images with its index."""
    root = images.class_folder(tmp_path / "data" / "set", samples=4)
    (tmp_path / "data" / "secret.jpg").write_bytes(images.jpeg(1))
    open_index(root, verify=images.verify)
    return root


def reforge_sidecar(root: Path, change: Callable[[dict[str, Any]], None], **more: Any) -> None:
    """Change a sidecar's columns, and its checksum in the manifest."""
    place = root.with_name(root.name + ".penstock")
    (sidecar,) = (place / "sidecars").iterdir()
    batch = pa.ipc.open_file(sidecar).get_batch(0)
    columns = {name: batch.column(name) for name in batch.schema.names}
    change(columns)
    fresh = pa.record_batch(columns).replace_schema_metadata(batch.schema.metadata)
    sidecar.unlink()
    write(sidecar, fresh, None)
    about, report = columns_of(place / "manifest.arrow")
    report["etag"][0] = sidecar_etag(os.fsencode(sidecar))
    report["bytes"][0] = max(1, more.get("size_bytes", report["bytes"][0]))
    forge(place / "manifest.arrow", about, report)


def as_dictionary(lists: Any) -> Any:
    values = lists.flatten()
    return pa.LargeListArray.from_arrays([0, len(values)], values.dictionary_encode())


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a column: it sets the first value, of a list the first item."""

    def change(columns: dict[str, Any]) -> None:
        values = columns[name].to_pylist()
        (values[0] if isinstance(values[0], list) else values)[0] = value
        columns[name] = pa.array(values, columns[name].type)

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("/files/name", b"../secret.jpg"),
        put("/files/name", b"/etc/passwd"),
        put("/files/name", b"a/../../secret.jpg"),
        put("/files/name", b"a\0b"),
        put("/files/name", b""),
        put("/files/name", b"x" * 5000),
        put("/files/bytes", -1),
        put("image/bytes", 0),
        put("image/bytes", 2**62),
        put("image/start", 1),
        put("image/start", -1),
        put("image/file", 99),
        put("image/file", -2),
        put("image/shape", 0),
        put("image/shape", 2**31),
        put("image/codec", None),
        lambda columns: columns.pop("image/crc32c"),
        lambda columns: columns.update(
            {"image/crc32c": pa.array([[1]], pa.large_list(pa.int64()))}
        ),
        lambda columns: columns.update(
            {"label/values": pa.array([[1]], pa.large_list(pa.int64()))}
        ),
        lambda columns: columns.update(
            {"/names": pa.array([[]], pa.large_list(pa.large_binary()))}
        ),
        lambda columns: columns.update({"/names": as_dictionary(columns["/names"])}),
    ],
    ids=range(21),
)
def test_a_hostile_sidecar_is_refused(
    indexed: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    reforge_sidecar(indexed, change)
    is_refused(indexed)


def test_a_sidecar_outside_the_index_is_refused(indexed: Path, tmp_path: Path) -> None:
    sidecars = indexed.with_name("set.penstock") / "sidecars"
    shutil.move(sidecars, tmp_path / "away")
    sidecars.symlink_to(tmp_path / "away")
    assert "leads out" in is_refused(indexed)


def test_a_shard_outside_the_pack_is_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    path = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    about, columns = columns_of(path)
    (tmp_path / "away").mkdir()
    (tmp_path / "pack" / "shard-000000.arrow").rename(tmp_path / "away" / "shard-000000.arrow")
    (tmp_path / "pack" / "link").symlink_to(tmp_path / "away")
    columns["uri"][0] = b"link/shard-000000.arrow"
    forge(path, about, columns)
    assert "leads out" in is_refused(tmp_path / "pack")


def reforge_shard(root: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> None:
    """Change a shard's columns, and its checksums in the manifest."""
    from penstock.readers.formats import FieldNotes, Sums

    path = root / "shard-000000.arrow"
    batch = pa.ipc.open_file(path).get_batch(0)
    columns = {name: batch.column(name) for name in batch.schema.names}
    change(columns)
    fresh = pa.record_batch(columns).replace_schema_metadata(batch.schema.metadata)
    path.unlink()
    write(path, fresh, pa.ipc.IpcWriteOptions(**options))
    about, report = columns_of(root / "_penstock" / "manifest.arrow")
    try:
        crcs, *shape = (
            columns[f"penstock/{kind}/image"].to_numpy()
            for kind in ("crc32c", "height", "width", "channels")
        )
        label = columns["label"].to_numpy()
        shapes = np.stack(shape, axis=1).astype(np.int64)
        image = FieldNotes(storage="span", crcs=crcs, shapes=shapes)
        sums = Sums.of({"image": image, "label": FieldNotes(storage="value", values=label)})
    except (KeyError, pa.ArrowInvalid, TypeError, ValueError):
        sums = Sums(1, 2)
    report["samples"][0], report["bytes"][0] = fresh.num_rows, path.stat().st_size
    report["crc32c"][0], report["columns_crc32c"][0] = sums.samples, sums.columns
    about["samples"] = sum(report["samples"])
    forge(root / "_penstock" / "manifest.arrow", about, report)


def lie(columns: dict[str, Any]) -> None:
    """Return offsets that lead out of the images."""
    image = columns["image"]
    _, offsets, flat = image.buffers()
    wrong = np.frombuffer(offsets, np.int64, len(image) + 1).copy()
    wrong[1] = -(2**40)
    columns["image"] = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(image), [None, pa.py_buffer(wrong), flat]
    )


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (put("image", b""), {}),
        (put("penstock/height/image", 0), {}),
        (put("penstock/width/image", -1), {}),
        (put("penstock/height/image", 2**30), {}),
        (lie, {}),
        (lambda columns: columns.pop("image"), {}),
        (lambda columns: columns.update(image=columns["image"].cast(pa.binary())), {}),
        (lambda columns: columns.update(more=columns["label"]), {}),
        (lambda _: None, {"compression": "zstd"}),
    ],
    ids=range(9),
)
def test_a_hostile_shard_is_refused(
    packed: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], options: dict[str, Any]
) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    reforge_shard(tmp_path / "pack", change, **options)
    is_refused(tmp_path / "pack")


@examples(150)
@given(
    changes=st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 255)), min_size=1, max_size=6)
)
def test_a_shard_with_any_footer_gives_samples_or_an_error(
    packed: Path, changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "footers"
    if not root.exists():
        shutil.copytree(packed, root)
    data = bytearray((packed / "shard-000000.arrow").read_bytes())
    for back, value in changes:
        data[-back] = value
    path = root / "shard-000000.arrow"
    path.unlink()  # never in place: another run's map may look into it
    path.write_bytes(data)
    with contextlib.suppress(DatasetError):  # any other one fails
        assert everything(root) == 12


def test_a_pack_whose_files_are_links_is_read(packed: Path, tmp_path: Path) -> None:
    """Files as the Hugging Face cache stores downloads."""
    for path in packed.rglob("*"):
        if path.is_file():
            link = tmp_path / "snapshot" / path.relative_to(packed)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    assert everything(tmp_path / "snapshot") == 12


def test_a_manifest_of_many_shards_is_read_at_once(packed: Path, tmp_path: Path) -> None:
    about, columns = columns_of(packed / "_penstock" / "manifest.arrow")
    shards(100_000, 10)(about, columns)
    path = tmp_path / "manifest.arrow"
    forge(path, about, columns)
    began = time.process_time()
    found = read_manifest(os.fsencode(path), remedy="")
    assert time.process_time() - began < CPU_S
    write_manifest(os.fsencode(tmp_path / "again.arrow"), found)
    again = read_manifest(os.fsencode(tmp_path / "again.arrow"), remedy="")
    assert list(again.names) == columns["uri"]
