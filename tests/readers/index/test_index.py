"""Test the index: built once, reused while its facts suffice, updated, refused if it is invalid."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.cache import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    IndexChangedError,
    MissingDependencyError,
    OtherVersionError,
    PenstockWarning,
    ReadError,
)
from penstock.readers import Dataset, build_index, open_index, pack
from penstock.readers.fieldtypes import Boxes, ClassLabel, Image, Mask, Schema, verification
from penstock.readers.formats import VERSION
from penstock.readers.index import label_correlation, read_manifest, write_manifest
from tests import images
from tests.files import quarantine
from tests.images import CountingVerifier
from tests.properties import examples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images.class_folder(tmp_path / "set", samples=12)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set virtual shards of 3 KB, so that a few small images fill several."""
    monkeypatch.setattr("penstock.readers.formats.candidates.PART_BYTES", 3000)


def beside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".penstock")


def test_the_facts_of_an_index(folder: Path) -> None:
    index = open_index(str(folder), verify=images.verify)
    assert (index.kind, index.samples, index.about.quarantined) == ("folder", 12, 0)
    assert tuple(index.schema) == ("image", "label")
    assert index.schema.class_names() == ("class-0", "class-1", "class-2")
    assert index.starts.tolist() == [0]
    assert index.sizes.tolist() == [12]
    assert index.shard_bytes.sum() == sum(p.stat().st_size for p in folder.rglob("*.jpg"))
    assert (index.images["image"].min_height, index.images["image"].max_height) == (16, 22)
    assert (index.images["image"].min_width, index.images["image"].max_width) == (20, 24)
    assert index.about.icc == pytest.approx(0)
    assert Path(index.place) == folder.with_name("set.penstock")


@pytest.mark.usefixtures("small_shards")
def test_shards_are_virtual_and_ids_go_through_them(folder: Path) -> None:
    index = open_index(str(folder), verify=images.verify)
    assert len(index.sizes) > 2
    assert index.sizes.sum() == 12
    assert index.starts.tolist() == [0, *np.cumsum(index.sizes)[:-1].tolist()]
    assert (index.sizes > 0).all()


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "flat", {f"{i}.jpg": images.jpeg(i) for i in range(3)})
    index = open_index(root, verify=images.verify)
    assert (tuple(index.schema), index.schema.class_names(), index.about.icc) == (
        ("image",),
        (),
        None,
    )


def test_bad_files_are_named_with_their_reason(tmp_path: Path) -> None:
    files = {f"a/{name}": data for name, data in images.GOOD.items()}
    files |= {f"a/{name}": data for name, (data, _) in images.BAD.items()}
    root = images.write_folder(tmp_path / "set", files | {"stray.txt": b"x"})
    summary = build_index(root, verify=images.verify)
    assert summary.samples == len(images.GOOD)
    assert summary.quarantined == len(images.BAD) + 1
    reasons = quarantine(tmp_path / "set.penstock")
    assert reasons.pop("stray.txt") == "its name is of another kind than image"
    assert set(reasons) == {f"a/{name}" for name in images.BAD}
    for name, (_, word) in images.BAD.items():
        assert word in reasons[f"a/{name}"], name


def test_dims_are_after_the_exif_orientation(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {"1.jpg": images.rotated_jpeg(1, 24, 32)})
    assert open_index(root, verify=images.verify).images["image"].fixed == (32, 24)


def test_a_file_without_permission_isnt_a_bad_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: object, *args: object, **kwargs: object) -> object:
        if isinstance(path, bytes) and path.endswith(b"0003.jpg"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(
        ReadError, match=r"class-0/0003\.jpg.*Permission denied.*permission to read"
    ):
        open_index(folder, verify=images.verify)


def test_without_a_good_sample_the_error_names_reasons(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {"a/x.jpg": b"", "a/y.jpg": b"text"})
    with pytest.raises(DatasetNotFoundError, match=r"a/x\.jpg: empty file"):
        open_index(root, verify=images.verify)


def test_opening_again_decodes_nothing(folder: Path) -> None:
    verify = CountingVerifier()
    first = open_index(folder, verify=verify)
    again = open_index(folder, verify=verify)
    assert verify.decoded == 12
    assert again.fingerprint == first.fingerprint


def test_a_new_file_is_found_and_only_it_is_decoded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verify = CountingVerifier()
    before = open_index(folder, verify=verify)
    images.write_folder(folder, {"class-1/new.jpg": images.jpeg(99), "class-0/bad.jpg": b"no"})
    caplog.set_level(logging.INFO, logger="penstock")
    after = open_index(folder, verify=verify)
    assert (after.samples, after.about.quarantined, verify.decoded) == (13, 1, 13)
    assert after.fingerprint != before.fingerprint
    assert "12 files are unchanged, 2 are new or changed, 0 are gone" in caplog.text


def test_a_removed_file_is_noticed(folder: Path) -> None:
    open_index(folder, verify=images.verify)
    (folder / "class-0" / "0000.jpg").unlink()
    assert open_index(folder, verify=images.verify).samples == 11


def test_a_folder_touched_without_a_change_keeps_its_index(folder: Path) -> None:
    verify = CountingVerifier()
    before = open_index(folder, verify=verify)
    os.utime(folder / "class-0", ns=(5, 5))
    after = open_index(folder, verify=verify)
    assert (after.fingerprint, verify.decoded) == (before.fingerprint, 12)
    assert dict(after.about.directories)["class-0"] == 5


def test_build_index_decodes_everything_again(folder: Path) -> None:
    verify = CountingVerifier()
    open_index(folder, verify=verify)
    seen: list[tuple[int, int, int]] = []
    build_index(folder, verify=verify, progress=lambda *counts: seen.append(counts))
    assert verify.decoded == 24
    assert seen[-1][:2] == (12, 12)


def test_the_index_is_stored_in_the_given_folder(folder: Path, tmp_path: Path) -> None:
    build_index(folder, out=tmp_path / "elsewhere", verify=images.verify)
    assert not beside(folder).exists()
    verify = CountingVerifier()
    assert open_index(folder, index=tmp_path / "elsewhere", verify=verify).samples == 12
    assert verify.decoded == 0


def test_an_index_of_another_dataset_is_refused(folder: Path, tmp_path: Path) -> None:
    other = images.write_folder(tmp_path / "other", {"x/1.jpg": images.jpeg(1)})
    build_index(other, out=tmp_path / "index", verify=images.verify)
    with pytest.raises(IndexChangedError, match="another dataset"):
        open_index(folder, index=tmp_path / "index", verify=images.verify)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_an_incomplete_index_of_a_folder_is_rebuilt(
    folder: Path, keep: float, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_index(folder, verify=images.verify)
    path = beside(folder) / "manifest.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    assert open_index(folder, verify=images.verify).fingerprint == before.fingerprint
    assert "is rebuilt" in caplog.text


@examples(30)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_manifest_with_a_flipped_byte_is_refused_or_equal(
    place: float, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "flipped"
    if not root.exists():
        images.class_folder(root, samples=4)
        open_index(root, verify=images.verify)
        shutil.copy(beside(root) / "manifest.arrow", root.with_suffix(".whole"))
    whole = root.with_suffix(".whole").read_bytes()
    data = bytearray(whole)
    data[int(place * len(data))] ^= flip
    path = root.with_suffix(f".{os.getpid()}.bad")
    path.write_bytes(data)
    try:
        got = read_manifest(os.fsencode(path), remedy="again")
    except DatasetError:
        return
    expected = read_manifest(os.fsencode(root.with_suffix(".whole")), remedy="again")
    assert got.about == expected.about
    assert list(got.names) == list(expected.names)
    assert got.samples.tolist() == expected.samples.tolist()
    assert got.shard_bytes.tolist() == expected.shard_bytes.tolist()


@pytest.mark.parametrize(
    ("version", "kind", "message"),
    [
        (VERSION + 1, DatasetError, "Upgrade penstock"),
        (VERSION - 1, OtherVersionError, r"earlier Penstock.*`penstock index`"),
    ],
)
def test_an_index_of_another_version_is_refused_with_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, kind: Any, message: str
) -> None:
    monkeypatch.setattr("penstock.readers.index.manifest.VERSION", version)
    open_index(folder, verify=images.verify)
    monkeypatch.undo()
    with pytest.raises(kind, match=message):
        open_index(folder, verify=images.verify)
    if version < VERSION:
        build_index(folder, verify=images.verify)
        assert open_index(folder).samples == 12


def test_an_older_index_in_a_cache_is_rebuilt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.readers.origin.origin.is_trusted", lambda *_: False)
    with monkeypatch.context() as older:
        older.setattr("penstock.readers.index.manifest.VERSION", VERSION - 1)
        kept = open_index(folder, cache=tmp_path / "cache", verify=images.verify)
    assert "indexes" in kept.place
    again = open_index(folder, cache=tmp_path / "cache", verify=images.verify)
    assert (again.place, again.samples) == (kept.place, 12)


def test_an_older_pack_is_refused_with_the_command_for_a_new_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("penstock.readers.index.manifest.VERSION", VERSION - 1)
        pack(folder, tmp_path / "pack", verify=images.verify)
    with pytest.raises(OtherVersionError, match=r"earlier Penstock.*penstock pack"):
        open_index(tmp_path / "pack")


def test_an_incomplete_sidecar_is_found(folder: Path) -> None:
    index = open_index(folder, verify=images.verify)
    (sidecar,) = (beside(folder) / "sidecars").iterdir()
    sidecar.write_bytes(sidecar.read_bytes()[:-200])
    with pytest.raises(CorruptShardError, match="penstock index"):
        index.open(0)
    sidecar.unlink()
    with pytest.raises(IndexChangedError, match="Open the dataset again"):
        index.open(0)


@pytest.mark.usefixtures("small_shards")
def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    first = open_index(folder, verify=images.verify)
    moved = tmp_path / "moved"
    folder.rename(moved)
    for path in moved.rglob("*.jpg"):
        os.utime(path, ns=(7, 7))
    second = open_index(moved, index=tmp_path / "index", verify=images.verify)
    assert second.fingerprint == first.fingerprint
    image = moved / "class-0" / "0000.jpg"
    image.write_bytes(image.read_bytes() + b"more")
    third = open_index(moved, index=tmp_path / "third", verify=images.verify)
    assert third.fingerprint != first.fingerprint


def test_packs_are_distinguished_from_folders(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "pack", verify=images.verify)
    index = open_index(tmp_path / "pack")
    assert (index.kind, index.about.shuffled, index.about.seed) == ("pack", True, 0)
    with pytest.raises(ConfigError, match="Leave index= out"):
        open_index(tmp_path / "pack", index=tmp_path / "index")
    with pytest.raises(ConfigError, match="pack"):
        build_index(tmp_path / "pack", verify=images.verify)
    with pytest.raises(ConfigError, match="format"):
        open_index(folder, format="zip")
    with pytest.raises(DatasetNotFoundError, match="manifest"):
        open_index(folder, format="pack")


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_pack_without_a_whole_manifest_is_no_image_folder(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    pack(folder, tmp_path / "pack", verify=images.verify)
    manifest = tmp_path / "pack" / "_penstock" / "manifest.arrow"
    if damage == "gone":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-50])
    with pytest.raises((DatasetNotFoundError, CorruptShardError), match="penstock pack"):
        open_index(tmp_path / "pack", verify=images.verify)


def test_a_remote_folder_keeps_its_index_in_the_cache(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for i in range(4):
        memory.pipe(f"/indexed/{'ab'[i % 2]}/{i}.jpg", images.jpeg(i))
    before = set(memory.find("/"))  # other tests' files are there, too
    verify = CountingVerifier()
    for _ in range(2):
        index = open_index("memory://indexed", cache=tmp_path, verify=verify)
        assert index.samples == 4
    assert verify.decoded == 4
    summary = build_index("memory://indexed", cache=tmp_path, verify=verify)
    assert str(tmp_path) in summary.place
    assert set(memory.find("/")) == before
    assert verify.decoded == 8
    assert index.open(0).name(0) == "a/0.jpg"


def test_without_a_decoder_the_remedy_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "entry_points", lambda **_: ())
    with pytest.raises(MissingDependencyError, match=r"penstock\[dali\]"):
        open_index(folder)


def test_a_manifest_reads_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    written = open_index(folder, verify=images.verify).manifest
    schema = Schema({**written.about.schema, "label": ClassLabel(("\udcff\n", "ü", "c"))})
    odd = replace(written, about=replace(written.about, schema=schema))
    backwards = {name: schema[name] for name in reversed(list(schema))}  # not by the alphabet
    facts = {name: written.about.fields[name] for name in backwards}
    turned = replace(odd.about, schema=Schema(backwards), fields=facts)
    for each in (odd, replace(odd, about=turned)):
        path = os.fsencode(tmp_path / "manifest.arrow")
        write_manifest(path, each)
        found = read_manifest(path, remedy="").about
        assert found == each.about
        assert list(found.fields) == list(each.about.schema)


counts = st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 9), max_size=5), max_size=8)


@examples(100)
@given(shards=counts)
def test_label_correlation_is_the_formula_on_pairs(shards: list[dict[int, int]]) -> None:
    drawn = [[label for label, n in shard.items() for _ in range(n)] for shard in shards]
    whole = [label for shard in drawn for label in shard]

    def share_alike(groups: list[list[int]]) -> float | None:
        pairs = [(a, b) for g in groups for i, a in enumerate(g) for b in g[:i]]
        return sum(a == b for a, b in pairs) / len(pairs) if pairs else None

    within, total = share_alike(drawn), share_alike([whole])
    expected = 0.0
    if within is not None and total is not None and total < 1:
        expected = (within - total) / (1 - total)
    assert label_correlation(shards) == pytest.approx(expected)


def test_label_correlation_of_sorted_shards_is_one() -> None:
    assert label_correlation([Counter({i: 50}) for i in range(20)]) == pytest.approx(1)


def test_an_index_of_windows_is_built_as_a_dataset_reads_it(tmp_path: Path) -> None:
    np.save(tmp_path / "steps.npy", np.arange(12))
    summary = penstock.index(
        tmp_path / "steps.npy", sample=(4,), stride=(2,), out=tmp_path / "index"
    )
    assert (summary.samples, summary.quarantined) == (5, 0)
    assert Path(summary.place) == tmp_path / "index"
    windows: dict[str, Any] = {"sample": (4,), "stride": (2,), "index": tmp_path / "index"}
    with Dataset(tmp_path / "steps.npy", **windows) as dataset:
        assert len(dataset) == summary.samples
    with pytest.raises(ConfigError, match="stride: got"):
        penstock.index(tmp_path / "steps.npy", stride=(2,))
    with pytest.raises(ConfigError, match="documents: got 'between'"):
        penstock.index(tmp_path / "steps.npy", documents="between")  # type: ignore[arg-type]


JPEGS = [images.jpeg(i) for i in range(2)]


MASK = images.encoded(images.picture(3, mode="L"), "PNG")


class Place:
    """A folder with a table, and the number of images that each of its indexes decoded."""

    def __init__(self, root):
        self.root, self.clock = root, 10**18
        images.write_folder(root, {"1.jpg": JPEGS[0], "2.jpg": JPEGS[1]})

    def open(self, rows, **options):
        path = self.root / "metadata.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        self.clock += 10**9
        os.utime(path, ns=(self.clock, self.clock))
        decoded = []

        def verify(samples):
            decoded.extend(samples)
            return images.verify(samples)

        with Dataset(self.root, allow_left_out=1, **options) as dataset:
            index = dataset.open(verify=verify, workers=1)
            batch = dataset.read(np.array([(0, 0)], np.int64), fields=("image",))
            assert len(batch.columns["image"].samples[0])
            return index, len(decoded)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "set")


def test_boxes_that_a_table_moves_out_of_their_image_are_found(place):
    def rows(x):
        return [{"file_name": f"{i}.jpg", "boxes": [[x * (i - 1), 0, 9, 9]]} for i in (1, 2)]

    schema = {"boxes": Boxes(of="image", format="xywh")}
    index, decoded = place.open(rows(5), schema=schema)
    assert (index.samples, index.about.quarantined, decoded) == (2, 0, 2)
    index, decoded = place.open(rows(50), schema=schema)
    assert (index.samples, index.about.quarantined, decoded) == (1, 1, 0)
    with open(os.path.join(os.fsdecode(index.place), "quarantine.jsonl")) as lines:
        (line,) = map(json.loads, lines)
    assert line["name"] == "2.jpg"
    assert line["reason"].startswith("boxes: box 0 lies outside its image: (50, 0, 9, 9)")
    index, decoded = place.open(rows(0), schema=schema)
    assert (index.samples, index.about.quarantined, decoded) == (2, 0, 1)


def test_a_file_that_was_a_mask_is_decoded_as_an_image(place):
    def rows(*names):
        return [
            {"file_name": f"{i}.jpg", **{f"{name}_file_name": f"m{i}.png" for name in names}}
            for i in (1, 2)
        ]

    images.write_folder(place.root, {"m1.png": MASK, "m2.png": MASK})
    index, decoded = place.open(rows("mask"))
    assert (index.schema["mask"], decoded) == (Mask(of="image", dtype="uint8"), 2)
    with pytest.warns(PenstockWarning, match='"mask" is read as pictures'):
        index, decoded = place.open(rows("mask", "depth"))
    assert (index.schema["mask"], index.schema["depth"], decoded) == (Image(), Image(), 6)
    index, decoded = place.open(rows("mask"))
    assert (index.schema["mask"], index.samples) == (Mask(of="image", dtype="uint8"), 2)
