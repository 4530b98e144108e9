"""The migration guides whose data is converted: the page's script converts what the other library
wrote, loses and changes no sample, and both columns deliver the same samples.

Where the other library isn't installed, the column with Penstock runs on the same samples.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock import pack
from tests.docs import other_formats
from tests.docs.guides import Guide, apart, assert_same, assert_same_set, column, installed, rows
from tests.images import jpeg
from tests.servers import serving

if TYPE_CHECKING:
    from tests.docs.other_formats import Row, Sets, Writer

PIXELS = 0.02  # of float32 normalised pixels: decoders round and upsample colours differently
STORE = Path("store/bucket")
STEPS = ("train_step", "mixed_step", "resumed_step", "eval_step")
DAMAGED = 1  # the sample of the set `damaged` whose end is missing
Check = Callable[[bytes, bytes], bool]


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    STORE.mkdir(parents=True)


@pytest.fixture
def _bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve STORE as s3://bucket."""
    with serving(STORE.parent) as server:
        for name in ("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"):
            monkeypatch.setenv(name, server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kkkkkkkk")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ssssssss")
        yield


def photographs(samples: int, first: int = 0, height: int = 60, width: int = 80) -> list[Row]:
    """Return photographs of different sizes, with classes that tell them apart."""
    numbers = range(first, first + samples)
    return [(jpeg(i, height + i % 7, width + i % 5, quality=95), i) for i in numbers]


def sets_of(*names: str) -> Sets:
    found = {
        "train": photographs(24),
        "val": photographs(21, height=300, width=340),
        "outdoor": photographs(28),
        "indoor": photographs(12, 100),
    }
    return {name: found[name] for name in names}


def with_damage(sets: Sets) -> Sets:
    damaged = photographs(3)
    image, label = damaged[DAMAGED]
    damaged[DAMAGED] = image[: 3 * len(image) // 4], label
    return sets | {"damaged": damaged}


def make_packs(
    guide: Guide,
    write: Writer,
    source: str,
    sets: Sets,
    *libraries: str,
    same: Check = bytes.__eq__,
) -> None:
    """Write the sets with the other library, convert them by the page's script and check the
    packs. Where the library isn't installed, pack the same samples."""
    if not installed(*libraries):
        for name, samples in sets.items():
            images, labels = zip(*samples, strict=True)
            pq.write_table(pa.table({"image": images, "label": labels}), f"{name}.parquet")
            pack(f"{name}.parquet", name, shuffle=name != "val")
        return
    everything = with_damage(sets)
    apart(_write_and_convert, guide, write, source, everything)
    for name, samples in everything.items():
        damaged = DAMAGED if name == "damaged" else None
        kept = {label: image for at, (image, label) in enumerate(samples) if at != damaged}
        found = {row["label"]: row["image"] for row in packed(name)}
        assert found.keys() == kept.keys()
        assert all(same(found[label], kept[label]) for label in kept)
        lines = Path(name, "_penstock/quarantine.jsonl").read_text().splitlines() if damaged else []
        assert [json.loads(line)["name"] for line in lines] == (
            [f"{name}.parquet, row {damaged}"] if damaged else []
        )


def _write_and_convert(guide: Guide, write: Writer, source: str, sets: Sets) -> None:
    write(sets)
    guide.write_files()
    for name in sets:
        script("convert").convert(source.format(name), name, shuffle=name != "val")
    if "convert_tokens.py" in guide.files():
        script("convert_tokens").convert(source.format("text"), "text.bin")


def script(name: str) -> Any:
    """Return a script of the page as a module."""
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(name: str) -> list[dict[str, Any]]:
    """Return the samples of a pack, as pyarrow reads them."""
    shards = [pa.ipc.open_file(shard).read_all() for shard in Path(name).glob("*.arrow")]
    samples: list[dict[str, Any]] = pa.concat_tables(shards).select(["image", "label"]).to_pylist()
    assert len({row["label"] for row in samples}) == len(samples)
    return samples


def publish(*names: str) -> None:
    """Copy packs and files to the store, as the reader does."""
    for name in names:
        Path(name).rename(STORE / name)


def check_after(after: dict[str, list[tuple[Any, ...]]]) -> None:
    assert sorted(column(after["train_step"], 1)) == sorted([*range(24)] * 2)
    assert column(after["eval_step"], 1) == [*range(21)]
    if after["resumed_step"]:
        assert sorted(column(after["resumed_step"], 1)) == [*range(24)]
    for images, labels in after["mixed_step"]:
        assert len(images) == 10
        assert sum(label >= 100 for label in labels) == 3


@pytest.mark.usefixtures("_bucket")
def test_mosaicml() -> None:
    guide = Guide("mosaicml-streaming", (*STEPS, "text_step"))
    sequences = np.random.default_rng(0).integers(0, 50_000, (20, 16))
    np.save("tokens.npy", sequences)
    sequences.astype("<u2").tofile("text.bin")
    sets = sets_of("train", "val", "outdoor", "indoor")
    make_packs(guide, other_formats.write_mds, "s3://bucket/mds/{}", sets, "streaming")
    publish(*sets, "text.bin")

    after = guide.run("After")
    check_after(after)
    assert np.array_equal(np.stack([row[0] for row in rows(after["text_step"])]), sequences)

    before = guide.before("streaming", "torchvision")
    for step in ("train_step", "mixed_step", "resumed_step"):
        assert_same_set(before[step], after[step], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)


@pytest.mark.usefixtures("_bucket")
def test_litdata() -> None:
    guide = Guide("litdata", STEPS)
    sets = sets_of("train", "val", "outdoor", "indoor")
    make_packs(guide, other_formats.write_chunks, "store/bucket/chunks/{}", sets, "litdata")
    publish(*sets)
    after = guide.run("After")
    check_after(after)

    before = guide.before("litdata", "torchvision", set_up=_allow_http)
    for step in ("train_step", "resumed_step"):
        assert_same_set(before[step], after[step], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_some_of(before["mixed_step"], sets["outdoor"] + sets["indoor"])


def _allow_http() -> None:
    """Let LitData read the test's store, which has no TLS."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS = {**downloader._OBSTORE_CLIENT_OPTIONS, "allow_http": True}


def test_ffcv() -> None:
    guide = Guide("ffcv", STEPS)
    sets = sets_of("train", "val")
    make_packs(guide, _write_betons, "{}.beton", sets, "ffcv", same=same_pixels)
    after = guide.run("After")
    check_after(after)

    before = guide.before("ffcv")
    assert_same_set(before["train_step"], after["train_step"], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=0.05)  # it crops first


def _write_betons(sets: Sets) -> None:
    """Write .beton files, and overwrite the JPEG of the damaged sample."""
    from ffcv.reader import Reader

    other_formats.write_beton(
        {name: photographs(len(sets[name])) if name == "damaged" else sets[name] for name in sets}
    )
    reader = Reader("damaged.beton")
    where = {int(start): int(size) for _, start, size in reader.alloc_table}
    start = int(reader.metadata["f0"]["data_ptr"][DAMAGED])
    with open("damaged.beton", "r+b") as file:
        file.seek(start)
        file.write(bytes(where[start]))


def same_pixels(found: bytes, original: bytes) -> bool:
    """Return whether an image has the other one's pixels, but for another encoding as JPEG."""
    is_png = found.startswith(b"\x89PNG")
    one, other = (np.asarray(Image.open(io.BytesIO(each)), float) for each in (found, original))
    return one.shape == other.shape and np.abs(one - other).mean() <= (0 if is_png else 2)


def test_grain() -> None:
    guide = Guide("grain", (*STEPS, "own_step"))
    sets = sets_of("train", "val", "outdoor", "indoor")
    make_packs(guide, other_formats.write_array_record, "{}.array_record", sets, "grain", "msgpack")
    after = guide.run("After")
    check_after(after)
    assert sorted(column(after["own_step"], 1)) == [*range(24)]

    before = guide.before("grain", "msgpack")
    for step in ("train_step", "resumed_step", "own_step"):
        assert_same_set(before[step], after[step], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_some_of(before["mixed_step"], sets["outdoor"] + sets["indoor"])


def test_tfdata() -> None:
    guide = Guide("tfdata", STEPS)
    sets = sets_of("train", "val", "outdoor", "indoor")
    make_packs(guide, other_formats.write_tfrecord, "{}-*", sets, "tensorflow")
    after = guide.run("After")
    check_after(after)

    before = guide.before("tensorflow")
    for step in ("train_step", "resumed_step"):
        assert_same_set(before[step], after[step], places=(1,))
    assert_same(before["eval_step"], after["eval_step"], tolerance=PIXELS)
    assert_some_of(before["mixed_step"], sets["outdoor"] + sets["indoor"])


def assert_some_of(calls: list[tuple[Any, ...]], samples: list[Row]) -> None:
    """Raise unless a step got samples of these, each at most once. A library that draws the part
    of each sample at random doesn't say which."""
    labels = column(calls, 1)
    assert len(set(labels)) == len(labels) > 0
    assert set(labels) <= {label for _, label in samples}
