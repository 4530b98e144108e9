"""Packs of every type of field: from tar files and packs, without images, interrupted, and by
ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError, DestinationError
from penstock.readers import Dataset, concat, open_index, pack
from penstock.readers.fieldtypes import (
    Array,
    DenseColumn,
    EncodedColumn,
    Image,
    ListColumn,
    Mask,
    RaggedColumn,
    Text,
    Value,
)
from tests import images, tars
from tests.files import npy, uploaded
from tests.images import png
from tests.readers.packing.test_pack import CHILD, ROOT
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.readers import Encoded, ImageFacts, Rejection, Source
    from penstock.readers.fieldtypes import Column

SAMPLES, SMALL = 24, 4000


def members(i: int, *, has_image: bool) -> dict[str, bytes]:
    """Return one sample's members, and its fields."""
    rng, key = np.random.default_rng(i), f"{i:04d}"
    report = {
        "score": i / 4,
        "vector": [i + k / 8 for k in range(8)],
        "path": [[k, i] for k in range(i % 4)],
    }
    found = {
        f"{key}.json": json.dumps(report).encode(),
        f"{key}.txt": f"sample {i}".encode() if i % 5 else b"",
        f"{key}.volume.npy": npy(rng.random((2, 3, 4), np.float32)),
        f"{key}.series.npy": npy(rng.integers(0, 99, (i % 3, 2), np.int16)),
        f"{key}.cls": b"%d" % (i % 3),
    }
    if has_image:
        height, width = 16 + i % 7, 20 + i % 5
        found[f"{key}.jpg"] = images.jpeg(i, height, width)
        found[f"{key}.mask.png"] = png(rng.integers(0, 9, (height, width), np.uint8))
    return found


def tar_folder(root: Path, *, has_image: bool, bad: dict[str, bytes] | None = None) -> Path:
    root.mkdir(parents=True)
    for number in range(3):
        files: dict[str, bytes] = {}
        for i in range(8 * number, 8 * number + 8):
            files |= members(i, has_image=has_image)
        files |= {name: data for name, data in (bad or {}).items() if name in files}
        (root / f"train-{number:06d}.tar").write_bytes(tars.archive(files))
    return root


@pytest.fixture(params=[True, False], ids=["with images", "without any"])
def has_image(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def source(tmp_path: Path, has_image: bool) -> Path:
    return tar_folder(tmp_path / "tars", has_image=has_image)


def never(_: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    raise AssertionError("nothing is to be decoded")


def make(src: Path | str | Source, dst: Path, **options: Any) -> Any:
    default: dict[str, Any] = {"shard_bytes": SMALL, "verify": images.verify, "workers": 2}
    return pack(src, dst, **(default | options))


def sample(column: Column, row: int) -> Any:
    if isinstance(column, EncodedColumn):
        return bytes(column.samples[row])
    if isinstance(column, ListColumn):
        return column.samples[row]
    found = column.values[row] if isinstance(column, DenseColumn) else column.sample(row)
    return found.dtype.str, found.shape, found.tolist()


def samples(url: Path | str, **options: Any) -> dict[str, list[Any]]:
    """Return the fields of each sample by name, as they are read."""
    with Dataset(url, allow_left_out=1, **options) as dataset:
        dataset.open(verify=images.verify)
        fields = tuple(dataset.schema)
        rows = dataset.contents.rows(np.arange(len(dataset)))
        with Dataset(url, fields=fields, allow_left_out=1, **options) as all_fields:
            batch = all_fields.read(rows)
            names = all_fields.names(range(len(dataset)))
    return {
        name: [sample(batch.columns[field], row) for field in fields]
        for row, name in enumerate(names)
    }


def everything(pack_folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(pack_folder)): path.read_bytes()
        for path in pack_folder.rglob("*")
        if path.is_file()
    }


def test_a_pack_holds_every_field_of_its_source(
    source: Path, tmp_path: Path, has_image: bool
) -> None:
    summary = make(source, tmp_path / "pack", verify=images.verify if has_image else never)
    assert (summary.samples, summary.quarantined) == (SAMPLES, 0)
    assert summary.shards > 2
    before, after = samples(source), samples(tmp_path / "pack")
    assert after == before
    schema = open_index(tmp_path / "pack").schema
    assert schema == open_index(source, verify=images.verify).schema
    assert isinstance(schema["series"], Array)
    assert schema["series"].shape == (None, 2)
    assert schema["volume"] == Array("float32", (2, 3, 4))
    assert schema["score"] == Value("float32")
    assert isinstance(schema["caption"], Text)
    if has_image:
        assert schema["mask"] == Mask("image", "uint8")
        assert isinstance(schema["image"], Image)


def test_a_pack_of_a_pack_decodes_nothing(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "one")
    make(tmp_path / "one", tmp_path / "two", seed=5, verify=never)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    assert list(samples(tmp_path / "two")) != list(samples(tmp_path / "one"))


def test_an_unshuffled_pack_has_the_sources_order_and_fingerprint(
    source: Path, tmp_path: Path
) -> None:
    index = open_index(source, verify=images.verify)
    pack(source, tmp_path / "pack", shuffle=False, verify=images.verify, shard_bytes="64MiB")
    assert list(samples(tmp_path / "pack")) == list(samples(source))
    assert list(open_index(tmp_path / "pack").schema) == list(index.schema)


def test_any_number_of_ranks_makes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "one")
    for size in (2, 3):
        for rank in reversed(range(size)):
            make(source, tmp_path / f"of-{size}", rank=rank, size=size)
        assert everything(tmp_path / f"of-{size}") == everything(tmp_path / "one")


class Stop(Exception):
    pass


def stopping(after: int) -> Any:
    calls: Iterator[int] = iter(range(10**6))

    def progress(*_: int) -> None:
        if next(calls) >= after:
            raise Stop

    return progress


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path, after: int
) -> None:
    make(source, tmp_path / "whole")
    with pytest.raises(Stop):
        make(source, tmp_path / "resumed", progress=stopping(after))
    make(source, tmp_path / "resumed")
    assert everything(tmp_path / "resumed") == everything(tmp_path / "whole")


@pytest.mark.parametrize(("where", "count"), [("before-rename", 1), ("after-rename", 2)])
def test_a_killed_run_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path, where: str, count: int
) -> None:
    make(source, tmp_path / "whole")
    child = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "resumed"), where, str(count)]
    assert subprocess.run(child, cwd=ROOT, timeout=PATIENCE_S, check=False).returncode == -9
    make(source, tmp_path / "resumed")
    assert everything(tmp_path / "resumed") == everything(tmp_path / "whole")


def test_some_fields_alone(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "some", fields=("vector", "caption"), verify=never)
    schema = open_index(tmp_path / "some").schema
    assert list(schema) == ["vector", "caption"]
    whole = samples(source)
    at = [list(open_index(source, verify=images.verify).schema).index(name) for name in schema]
    assert samples(tmp_path / "some") == {
        name: [values[place] for place in at] for name, values in whole.items()
    }
    with pytest.raises(DestinationError, match="another fields"):
        make(source, tmp_path / "some", fields=("vector",), verify=never)
    with pytest.raises(ConfigError, match="fields: got"):
        make(source, tmp_path / "none", fields=("vector", "colour"))
    make(tmp_path / "some", tmp_path / "one", fields=("caption",), verify=never)
    assert list(open_index(tmp_path / "one").schema) == ["caption"]


def test_a_mask_without_its_image_is_refused(tmp_path: Path) -> None:
    source = tar_folder(tmp_path / "tars", has_image=True)
    with pytest.raises(ConfigError, match="mask"):
        make(source, tmp_path / "pack", fields=("mask", "label"))


BAD = {
    "0003.jpg": (images.truncated(images.jpeg(3)), "image: truncated"),
    "0005.mask.png": (png(np.zeros((3, 3), np.uint8)), "mask: it is 3 wide"),
    "0009.txt": (b"\xff\xfe\xff", "caption: not UTF-8"),
    "0012.volume.npy": (npy(np.zeros((2, 3, 4)))[:-9], "volume: truncated"),
}


def test_bad_samples_are_named_with_their_field(tmp_path: Path) -> None:
    bad = {name: data for name, (data, _) in BAD.items()}
    source = tar_folder(tmp_path / "tars", has_image=True, bad=bad)
    summary = make(source, tmp_path / "pack")
    assert (summary.samples, summary.quarantined) == (SAMPLES - len(BAD), len(BAD))
    lines = (tmp_path / "pack/_penstock/quarantine.jsonl").read_text().splitlines()
    reasons = {entry["name"]: entry["reason"] for entry in map(json.loads, lines)}
    for name, (_, reason) in BAD.items():
        (said,) = [why for where, why in reasons.items() if name.partition(".")[0] in where]
        assert said.startswith(reason)
    assert samples(tmp_path / "pack") == samples(source)


@pytest.mark.parametrize("kept", [True, False], ids=["cached", "passing"])
@pytest.mark.parametrize("fields", [None, ("volume", "series"), ("caption", "score", "vector")])
def test_a_remote_pack_gives_all_fields(
    source: Path,
    tmp_path: Path,
    kept: bool,
    fields: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(source, tmp_path / "pack")
    wanted = samples(tmp_path / "pack")
    names = fields or tuple(open_index(tmp_path / "pack").schema)
    if not kept:
        monkeypatch.setattr("penstock.cache.blobs.blob_fills.BlobFills.open", lambda *_, **__: None)
    with (
        uploaded(tmp_path / "pack") as url,
        Dataset(url, fields=names, cache=tmp_path / "cache") as dataset,
    ):
        rows = dataset.contents.rows(np.arange(len(dataset)))
        batch = dataset.read(rows[::-1])
        assert dataset.index.open(0).source.is_kept == kept
        order = list(open_index(tmp_path / "pack").schema)
        for place, name in enumerate(reversed(dataset.names(range(SAMPLES)))):
            for field in names:
                found = sample(batch.columns[field], place)
                assert found == wanted[name][order.index(field)], field


def test_only_the_bytes_of_the_selected_fields_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for i in range(40):
        files[f"{i}.large.npy"] = npy(rng.random((100, 100)))
        files[f"{i}.series.npy"] = npy(rng.random((1000 + i, 2)))
        files[f"{i}.txt"] = b"a text"
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "all.tar").write_bytes(tars.archive(files))
    summary = make(tmp_path / "tars", tmp_path / "pack", shard_bytes="64MiB", verify=never)
    assert summary.bytes > 3_000_000
    monkeypatch.setattr("penstock.cache.blobs.blob_fills.BlobFills.open", lambda *_, **__: None)

    def fetched(url: str, *fields: str) -> int:
        with Dataset(url, fields=fields, cache=tmp_path / "-".join(fields)) as one:
            one.open()
            before = one.traffic().bytes_remote
            one.read(np.array([[0, 7], [0, 31]]))
            return one.traffic().bytes_remote - before

    with uploaded(tmp_path / "pack") as url:
        captions = fetched(url, "caption")
        assert captions < 60_000
        large = fetched(url, "large") - captions
        assert 2 * 79_000 <= large < 3 * 80_000
        series = fetched(url, "series") - captions
        assert 2 * 15_500 <= series < 3 * 17_000


def test_a_dataset_a_part_of_one_and_several_joined(source: Path, tmp_path: Path) -> None:
    whole = samples(source)
    with Dataset(source) as dataset:
        dataset.open(verify=images.verify)
        make(dataset, tmp_path / "whole")
        assert samples(tmp_path / "whole") == whole
        ids = np.array([3, 20, 9, 4])
        make(dataset.subset(ids), tmp_path / "part", shuffle=False)
        part = samples(tmp_path / "part")
        assert list(part) == dataset.names(np.sort(ids))
        assert part == {name: whole[name] for name in part}
    with Dataset(tmp_path / "part") as one, Dataset(tmp_path / "whole") as other:
        summary = make(concat([one.subset([0, 1]), other]), tmp_path / "both", shuffle=False)
        assert summary.samples == 2 + SAMPLES
        make(other, tmp_path / "again", verify=never)
        some = list(samples(tmp_path / "part"))[:2]
        assert samples(tmp_path / "both") == whole
        assert open_index(tmp_path / "both").samples == 2 + SAMPLES
        assert all(name in whole for name in some)
    assert samples(tmp_path / "again") == whole


def test_a_dataset_refuses_arguments_that_it_already_has(source: Path, tmp_path: Path) -> None:
    with Dataset(source) as dataset, pytest.raises(ConfigError, match="schema= together with a"):
        make(dataset, tmp_path / "pack", schema={"score": Value("float64")})
    with Dataset(source) as dataset:
        dataset.open(verify=images.verify)
        with pytest.raises(ConfigError, match="contain each other"):
            make(dataset, source / "pack")


def test_a_column_is_ragged_where_its_samples_are(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "pack")
    with Dataset(tmp_path / "pack", fields=("series", "volume", "path")) as dataset:
        batch = dataset.read(dataset.contents.rows(np.arange(5)))
    assert isinstance(batch.columns["series"], RaggedColumn)
    assert isinstance(batch.columns["path"], RaggedColumn)
    assert isinstance(batch.columns["volume"], DenseColumn)
