"""Packing: the order of samples, quarantine, kill -9, destinations, several ranks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import (
    ConfigError,
    CorruptSampleError,
    DatasetNotFoundError,
    DestinationError,
    IndexChangedError,
    OtherVersionError,
    WriteError,
)
from penstock.readers import Dataset, PackSummary, open_index, pack
from penstock.readers.formats.folder import FolderFormat
from penstock.readers.packing import cut_evenly, plan_samples, shuffled
from tests import images
from tests.files import files_below
from tests.properties import examples
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers import Encoded, ImageFacts, Rejection
    from penstock.readers.origin import Origin

SMALL = 4000  # bytes a shard: a handful of test images
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """30 photographs in 3 classes, and a few files that aren't photographs."""
    return images.flawed_folder(tmp_path / "set", samples=30)


def make(src: Path | str, dst: Path, **options: object) -> PackSummary:
    settings: dict[str, object] = {"shard_bytes": SMALL, "verify": images.verify, "workers": 2}
    return pack(src, dst, **(settings | options))  # type: ignore[arg-type]


def samples(path: Path) -> list[tuple[bytes, int]]:
    """Return (bytes, label) of all samples, in index order."""
    with Dataset(path, allow_left_out=1) as dataset:
        sizes = dataset.index.sizes
        rows = [(shard, row) for shard, n in enumerate(sizes) for row in range(n)]
        batch = dataset.read(np.array(rows, np.int64))
    labels = batch.columns["label"].values.tolist()
    return [
        (bytes(e), label) for e, label in zip(batch.columns["image"].samples, labels, strict=True)
    ]


def sources(path: Path) -> list[int]:
    found = []
    for shard in sorted(path.glob("*.arrow")):
        with pa.ipc.open_file(shard) as reader:
            found += reader.read_all()["penstock/source"].to_pylist()
    return found


def test_a_pack_holds_every_good_image_once(folder: Path, tmp_path: Path) -> None:
    summary = make(folder, tmp_path / "pack")
    assert (summary.samples, summary.quarantined, summary.complete) == (30, 3, True)
    assert summary.shards > 3
    good = [p for p in folder.glob("class-*/0*.jpg")]
    expected = [(p.read_bytes(), int(p.parent.name[-1])) for p in good]
    packed = samples(tmp_path / "pack")
    assert sorted(packed) == sorted(expected)
    shards = sorted(p.name for p in (tmp_path / "pack").glob("*.arrow"))
    assert shards == [f"shard-{i:06d}.arrow" for i in range(summary.shards)]
    assert summary.bytes == sum((tmp_path / "pack" / name).stat().st_size for name in shards)
    own = {p.name for p in (tmp_path / "pack" / "_penstock").iterdir()}
    assert own == {"manifest.arrow", "quarantine.jsonl"}


def test_the_quarantine_names_what_is_left_out(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "pack")
    lines = (tmp_path / "pack" / "_penstock" / "quarantine.jsonl").read_text().splitlines()
    reasons = {entry["name"]: entry["reason"] for entry in map(json.loads, lines)}
    assert set(reasons) == {"class-1/empty.jpg", "class-1/truncated.jpg", "stray.txt"}


def test_source_ids_are_those_of_the_folders_index(folder: Path, tmp_path: Path) -> None:
    index = open_index(folder, verify=images.verify)
    make(folder, tmp_path / "pack")
    original = samples(folder)
    assert [original[i] for i in sources(tmp_path / "pack")] == samples(tmp_path / "pack")
    assert sorted(sources(tmp_path / "pack")) == list(range(index.samples))


@pytest.mark.parametrize("shard_bytes", [SMALL, "64MiB"])
def test_unshuffled_ids_are_the_folders(
    folder: Path, tmp_path: Path, shard_bytes: int | str
) -> None:
    index = open_index(folder, verify=images.verify)
    make(folder, tmp_path / "pack", shuffle=False, shard_bytes=shard_bytes)
    assert samples(tmp_path / "pack") == samples(folder)
    assert sources(tmp_path / "pack") == list(range(index.samples))
    if shard_bytes == "64MiB":  # the same shards, so the same dataset to a state
        assert open_index(tmp_path / "pack").fingerprint == index.fingerprint


def test_any_arrow_tool_opens_a_shard(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "pack")
    with pa.memory_map(str(tmp_path / "pack" / "shard-000000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    noted = [
        f"penstock/{kind}/image" for kind in ("crc32c", "height", "width", "channels", "codec")
    ]
    assert table.column_names == ["image", "label", *noted, "penstock/source", "penstock/name"]
    assert table.schema.field("image").type == pa.large_binary()
    assert table["penstock/codec/image"].to_pylist() == ["jpeg"] * table.num_rows


def test_an_old_pack_names_the_command_that_makes_a_new_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:
        old.setattr("penstock.readers.index.manifest.VERSION", 1)
        make(folder, tmp_path / "pack")
    with pytest.raises(OtherVersionError, match=rf"format 1.*penstock pack {folder} DST"):
        open_index(tmp_path / "pack")
    with pytest.raises(OtherVersionError, match="penstock pack"):
        make(tmp_path / "pack", tmp_path / "new")
    with pytest.raises(DestinationError, match="an earlier Penstock"):
        make(folder, tmp_path / "pack")


def test_a_pack_of_a_pack(folder: Path, tmp_path: Path) -> None:
    def never(_: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        raise AssertionError("a pack's images were verified when it was written")

    make(folder, tmp_path / "one")
    make(tmp_path / "one", tmp_path / "two", seed=5, verify=never)
    original = samples(tmp_path / "one")
    assert [original[i] for i in sources(tmp_path / "two")] == samples(tmp_path / "two")
    assert samples(tmp_path / "two") != original
    shard = tmp_path / "one" / "shard-000000.arrow"
    data = bytearray(shard.read_bytes())
    data[data.index(b"\xff\xd8\xff") + 30] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptSampleError, match="checksum"):
        make(tmp_path / "one", tmp_path / "three")


def test_a_flat_folder_packs_without_labels(tmp_path: Path) -> None:
    flat = {f"{i}.jpg": images.jpeg(i) for i in range(5)}
    make(images.write_folder(tmp_path / "flat", flat), tmp_path / "pack")
    index = open_index(tmp_path / "pack")
    assert (tuple(index.schema), index.about.icc, index.schema.class_names()) == (
        ("image",),
        None,
        (),
    )


def test_a_remote_source(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for i in range(6):
        memory.pipe(f"/packed/{'ab'[i % 2]}/{i}.jpg", images.jpeg(i))
    assert make("memory://packed", tmp_path / "pack").samples == 6
    assert sorted(samples(tmp_path / "pack"))[0][0] in {images.jpeg(i) for i in range(6)}


CHILD = """
import os, signal, sys
from pathlib import Path
from penstock.readers import pack
from tests import images

src, dst, where, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
calls = 0

def die_at(place):
    global calls
    calls += place == where
    if calls > count:
        os.kill(os.getpid(), signal.SIGKILL)

rename = os.replace
def replace(a, b):
    die_at("before-rename")
    rename(a, b)
    die_at("after-rename")
os.replace = replace
fsync = os.fsync
def sync(fd):
    die_at("before-fsync")
    fsync(fd)
os.fsync = sync
pack(src, dst, shard_bytes=4000, verify=images.verify, workers=2,
     progress=lambda *_: die_at("progress"))
"""


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("progress", 3),
        ("before-fsync", 0),
        ("before-rename", 1),
        ("after-rename", 1),
        ("before-rename", 4),
        ("after-rename", 5),
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    folder: Path, tmp_path: Path, where: str, count: int
) -> None:
    resumed = tmp_path / "resumed"
    assert run_child(folder, resumed, where, count) == -9
    assert not (resumed / "_penstock" / "manifest.arrow").exists()
    with pytest.raises(DatasetNotFoundError):
        open_index(resumed, verify=images.verify)
    assert_whole(folder, resumed)


def run_child(folder: Path, destination: Path, where: str, count: int) -> int:
    """Pack in a child that is killed there; return its exit status."""
    child = [sys.executable, "-c", CHILD, str(folder), str(destination), where, str(count)]
    return subprocess.run(child, cwd=ROOT, timeout=PATIENCE_S, check=False).returncode


def assert_whole(folder: Path, resumed: Path) -> None:
    make(folder, resumed)
    make(folder, resumed.with_name("whole"))
    assert files_below(resumed) == files_below(resumed.with_name("whole"))


@pytest.mark.grid
@pytest.mark.parametrize("where", ["before-fsync", "before-rename", "after-rename"])
@pytest.mark.parametrize("count", range(20))
def test_a_run_that_is_killed_anywhere_resumes_to_the_same_bytes(
    folder: Path, tmp_path: Path, where: str, count: int
) -> None:
    assert run_child(folder, tmp_path / "resumed", where, count) in (-9, 0)
    assert_whole(folder, tmp_path / "resumed")


class Stop(Exception):
    """A progress callable that ends the run."""


def stop_after(calls: int) -> object:
    left = iter(range(calls))

    def progress(*_: int) -> None:
        if next(left, None) is None:
            raise Stop

    return progress


def test_finished_shards_arent_written_again(folder: Path, tmp_path: Path) -> None:
    decoded = 0

    def verify(encoded: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        nonlocal decoded
        decoded += len(encoded)
        return images.verify(encoded)

    with pytest.raises(Stop):
        make(folder, tmp_path / "pack", progress=stop_after(5))
    make(folder, tmp_path / "pack", verify=verify)
    assert 0 < decoded < 28


def test_a_truncated_finished_shard_is_written_again(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "whole")
    with pytest.raises(Stop):
        make(folder, tmp_path / "pack", progress=stop_after(5))
    shard = tmp_path / "pack" / "shard-000000.arrow"
    shard.write_bytes(shard.read_bytes()[:100])
    make(folder, tmp_path / "pack")
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "whole")


def test_a_complete_pack_is_returned_at_once(folder: Path, tmp_path: Path) -> None:
    first = make(folder, tmp_path / "pack")
    before = files_below(tmp_path / "pack")
    again = make(folder, tmp_path / "pack", verify=lambda _: pytest.fail("not decoded again"))
    assert (again.samples, again.bytes) == (first.samples, first.bytes)
    assert files_below(tmp_path / "pack") == before


@pytest.mark.parametrize("size", [2, 3, 40])
def test_ranks_make_the_same_pack_together(folder: Path, tmp_path: Path, size: int) -> None:
    make(folder, tmp_path / "alone")
    done = [make(folder, tmp_path / "together", rank=rank, size=size) for rank in range(size)]
    assert [summary.complete for summary in done[:-1]].count(True) <= size - 1
    assert done[-1].complete
    assert files_below(tmp_path / "together") == files_below(tmp_path / "alone")


def test_two_processes_of_one_rank_dont_mix(folder: Path, tmp_path: Path) -> None:
    def again(*_: int) -> None:
        make(folder, tmp_path / "pack")

    with pytest.raises(DestinationError, match="another process"):
        make(folder, tmp_path / "pack", progress=again)


def foreign_file(dst: Path, _: Path) -> None:
    images.write_folder(dst, {"notes.txt": b"mine"})


def foreign_shard(dst: Path, _: Path) -> None:
    images.write_folder(dst, {"shard-000000.arrow": b"of another pack"})


def other_settings(dst: Path, folder: Path) -> None:
    make(folder, dst, seed=8)


def unfinished_other(dst: Path, folder: Path) -> None:
    with pytest.raises(Stop):
        make(folder, dst, seed=8, progress=stop_after(3))


def an_indexed_folder(dst: Path, _: Path) -> None:
    images.write_folder(dst, {"shard-000001.arrow": images.jpeg(1), "1.jpg": images.jpeg(1)})
    open_index(dst, verify=images.verify, format="folder")


def a_torn_pack(dst: Path, folder: Path) -> None:
    make(folder, dst)
    shard = dst / "shard-000001.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    "fill",
    [foreign_file, foreign_shard, other_settings, unfinished_other, an_indexed_folder, a_torn_pack],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_destination_with_other_data_is_left_alone(
    folder: Path, tmp_path: Path, fill: object
) -> None:
    fill(tmp_path / "dst", folder)  # type: ignore[operator]
    before = files_below(tmp_path / "dst")
    with pytest.raises(DestinationError, match="Nothing was changed"):
        make(folder, tmp_path / "dst")
    assert files_below(tmp_path / "dst") == before


def test_a_destination_that_is_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").write_bytes(b"x")
    with pytest.raises(DestinationError, match="file"):
        make(folder, tmp_path / "dst")


def test_source_and_destination_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    for dst in (folder, folder / "pack", folder.parent, tmp_path / "link" / "pack"):
        with pytest.raises(ConfigError, match="contain each other"):
            make(folder, dst)
    with pytest.raises(ConfigError, match="local"):
        pack(folder, "memory://pack", verify=images.verify)


@pytest.mark.parametrize("wrong", [{"rank": 2, "size": 2}, {"rank": -1}, {"shard_bytes": "0"}])
def test_wrong_arguments(folder: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make(folder, tmp_path / "pack", **wrong)
    assert not (tmp_path / "pack").exists()


def test_nothing_good_is_an_error_that_names_reasons(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {"a/1.jpg": b"", "a/2.jpg": b"?" * 5000})
    with pytest.raises(DatasetNotFoundError, match=r"a/1\.jpg: empty"):
        make(root, tmp_path / "pack")
    assert b"not an image" in (tmp_path / "pack" / "_penstock" / "quarantine.jsonl").read_bytes()


def test_a_shard_without_a_good_image_leaves_the_others(tmp_path: Path) -> None:
    files = {f"a/{i}.jpg": images.jpeg(i) for i in range(6)} | {"b/no.jpg": b"?" * 9000}
    make(images.write_folder(tmp_path / "set", files), tmp_path / "pack", shard_bytes=900)
    assert open_index(tmp_path / "pack").samples == 6
    assert len(samples(tmp_path / "pack")) == 6


@pytest.mark.parametrize("change", ["grown", "gone", "rewritten"])
def test_a_source_file_that_changes_meanwhile_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    real = FolderFormat.list

    def list_then_change(indexing: FolderFormat, origin: Origin) -> object:
        found = real(indexing, origin)
        victim = folder / "class-2" / "0002.jpg"
        data = victim.read_bytes()
        if change == "grown":
            victim.write_bytes(data + b"x")
        elif change == "gone":
            victim.unlink()
        else:
            victim.write_bytes(data[::-1])
            victim.write_bytes(data)
            os.utime(victim, ns=(3, 3))
        return found

    monkeypatch.setattr(FolderFormat, "list", list_then_change)
    with pytest.raises(IndexChangedError, match=r"class-2/0002\.jpg"):
        make(folder, tmp_path / "pack")


def test_a_full_disk_is_a_clean_error_and_the_pack_resumes_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, tmp_path / "whole")
    real, calls = os.fsync, iter(range(6))

    def full(fd: int) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"disk is full.*run the same command again"):
        make(folder, tmp_path / "pack")
    monkeypatch.undo()
    assert not [name for name in files_below(tmp_path / "pack") if name.endswith(".tmp")]
    make(folder, tmp_path / "pack")
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "whole")


sizes_of_samples = st.lists(st.integers(0, 500), min_size=1, max_size=80)


@examples(150)
@given(sizes=sizes_of_samples, shard_bytes=st.integers(1, 3000), seed=st.integers(0, 2**70))
def test_a_plan_holds_each_sample_once_in_shards_of_about_the_size(
    sizes: list[int], shard_bytes: int, seed: int
) -> None:
    array = np.array(sizes, np.int64)
    positions = list(plan_samples(array, shuffle=True, seed=seed, shard_bytes=shard_bytes))
    assert sorted(np.concatenate(positions).tolist()) == list(range(len(sizes)))
    assert all(map(len, positions))
    assert len(positions) <= max(1, -(-sum(sizes) // shard_bytes))
    for mine in positions:
        held = array[mine]
        assert held.sum() <= shard_bytes + held.max()


def test_cutting_survives_sets_of_petabytes() -> None:
    sizes = np.full(1000, 10**13, np.int64)
    cut = cut_evenly(np.arange(1000), sizes, 10**13)
    assert len(cut) == 1000


def test_the_shuffle_never_changes() -> None:
    assert shuffled(10, 0).tolist() == SHUFFLED
    assert shuffled(10, 1).tolist() != SHUFFLED


SHUFFLED = [1, 4, 5, 7, 6, 9, 0, 3, 2, 8]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pack_and_a_pack_of_it_keep_the_names_of_the_source(
    tmp_path: Path, shuffle: bool
) -> None:
    files = {f"class-{i % 3}/{i:02d} \u00e9\n.jpg": images.jpeg(i) for i in range(12)}
    root = images.write_folder(tmp_path / "set", files | {"class-0/bad.jpg": b"no image"})
    first, second = tmp_path / "first", tmp_path / "second"
    pack(root, first, shuffle=shuffle, seed=1, shard_bytes=3000, verify=images.verify)
    pack(first, second, shuffle=shuffle, seed=2, shard_bytes=4000)
    with Dataset(root) as source, Dataset(first) as packed, Dataset(second) as again:
        source.open(verify=images.verify)
        known = dict(zip(source.names(range(12)), contents(source), strict=True))
        for dataset in (packed, again):
            names = dataset.names(range(12))
            assert dict(zip(names, contents(dataset), strict=True)) == known
            assert dataset.names([7, 3, 7]) == [names[7], names[3], names[7]]
        assert (again.names(range(12)) == packed.names(range(12))) is not shuffle
    with Dataset(f"file://{second}", cache=tmp_path / "cache") as dataset:
        assert sorted(dataset.names(range(12))) == sorted(known)


def contents(dataset: Dataset) -> list[bytes]:
    sizes = dataset.index.sizes.tolist()
    rows = np.array([(s, r) for s, n in enumerate(sizes) for r in range(n)], np.int64)
    return [bytes(sample) for sample in dataset.read(rows).columns["image"].samples]
