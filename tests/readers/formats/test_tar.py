"""Tar files as a dataset: the samples follow WebDataset's rule, and hostile archives do no harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import tarfile
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import (
    ConfigError,
    DatasetError,
    DatasetNotFoundError,
    IndexChangedError,
    PenstockError,
    PenstockWarning,
)
from penstock.readers import Dataset, build_index, open_index, pack
from penstock.readers.fieldtypes import Array, Image, Text, Value
from penstock.readers.origin import of_names, place_of
from tests import images, tars
from tests.files import quarantine
from tests.properties import examples

JPEG = images.jpeg(1)

# Some of these have further members; test_unread.py has the warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*left out")


def opened(url: object, **options: object) -> Dataset:
    """Open a dataset whose index is built with Pillow."""
    dataset = Dataset(url, allow_left_out=1, **options)  # type: ignore[arg-type]
    dataset.open(verify=images.verify, workers=2)
    return dataset


def everything(dataset: Dataset, mode: str = "copy") -> tuple[list[str], list[int], list[bytes]]:
    """Return names, labels (or none) and bytes of all samples, by id."""
    rows = [
        (shard, row) for shard, n in enumerate(dataset.index.sizes.tolist()) for row in range(n)
    ]
    batch = dataset.read(np.array(rows, np.int64), mode=mode)  # type: ignore[arg-type]
    assert batch.ids.tolist() == list(range(len(dataset)))
    labels = batch.columns["label"].values.tolist() if "label" in batch.columns else []
    return (
        dataset.names(batch.ids),
        labels,
        [bytes(sample) for sample in batch.columns["image"].samples],
    )


def by_tarfile(*paths: Path) -> tuple[list[str], list[int], list[bytes]]:
    """Return the same as `everything`, read by Python's tarfile."""
    names, labels, data = [], [], []
    for path in paths:
        with tarfile.open(path) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
        for name, content in files.items():
            if name.endswith(".jpg"):
                names.append(f"{path.name}/{name}")
                labels.append(int(files[name[:-3] + "cls"]))
                data.append(content)
    return names, labels, data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tars.tar_folder(tmp_path / "set")


@pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
def test_ids_labels_and_bytes_are_those_that_tarfile_reads(folder: Path, mode: str) -> None:
    dataset = opened(folder)
    assert everything(dataset, mode) == by_tarfile(*sorted(folder.glob("*.tar")))
    index = dataset.index
    assert (index.kind, index.sizes.tolist()) == ("tar", [8] * 3)
    assert tuple(index.schema) == ("image", "label")
    assert index.about.passed_over == {}
    assert index.about.progressive == 0
    assert index.shard_bytes.tolist() == [p.stat().st_size for p in sorted(folder.glob("*.tar"))]
    # Opened again, nothing is built (there is no verifier to do it with).
    assert open_index(folder, verify=None).fingerprint == index.fingerprint


def test_one_file_or_a_pattern_is_a_dataset_of_its_own(folder: Path) -> None:
    paths = sorted(folder.glob("*.tar"))
    some = opened(folder / "train-{000000..000001}.tar")
    assert everything(some) == by_tarfile(*paths[:2])
    assert everything(opened(str(paths[2]))) == by_tarfile(paths[2])
    assert everything(opened(f"file://{paths[2]}")) == by_tarfile(paths[2])
    assert everything(opened(folder)) == by_tarfile(*paths)
    assert everything(some) == by_tarfile(*paths[:2])
    backwards = opened(folder / "train-{000002,000000}.tar")
    assert everything(backwards) == by_tarfile(paths[2], paths[0])
    with pytest.raises(DatasetNotFoundError, match=r"2 of 5 files don't exist.*000003"):
        opened(folder / "train-{000000..000004}.tar")
    with pytest.raises(ConfigError, match="format"):
        opened(folder / "train-000000.tar", format="folder")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://b/x-{008..011}.tar", ["x-008.tar", "x-009.tar", "x-010.tar", "x-011.tar"]),
        ("/d/{a,b}/{0..1}.tar", ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]),
        ("one.tar", ["one.tar"]),
    ],
)
def test_patterns_expand_as_webdataset_writes_them(url: str, wanted: list[str]) -> None:
    selection = place_of(url).selection
    assert selection is not None
    assert list(selection.parts) == wanted


@pytest.mark.parametrize(
    "url", ["a-{3..1}.tar", "a-{1..2.tar", "a-{}.tar", "a-{1,1}.tar", "a-{0..99999999}.tar"]
)
def test_invalid_patterns_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        of_names([url])


def test_a_remote_set_is_read_through_copies_and_indexed_in_the_cache(
    folder: Path, tmp_path: Path
) -> None:
    fs = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        fs.pipe_file(f"/tars-{tmp_path.name}/{path.name}", path.read_bytes())
    url = f"memory://tars-{tmp_path.name}"
    paths = sorted(folder.glob("*.tar"))
    assert everything(opened(url, cache=tmp_path / "cache")) == by_tarfile(*paths)
    picked = opened(url + "/train-{000001..000002}.tar", cache=tmp_path / "cache")
    assert everything(picked) == by_tarfile(*paths[1:])
    build_index(url, verify=images.verify, cache=tmp_path / "cache")
    assert not fs.exists(f"/tars-{tmp_path.name}.penstock")
    build_index(url, out=f"{url}.penstock", verify=images.verify, cache=tmp_path / "cache")
    assert fs.exists(f"/tars-{tmp_path.name}.penstock/manifest.arrow")
    with pytest.warns(PenstockWarning, match="cache="):
        assert everything(Dataset(url)) == by_tarfile(*paths)
    fs.rm(f"/tars-{tmp_path.name}", recursive=True)


def test_a_changed_archive_is_indexed_again_or_detected_when_read(folder: Path) -> None:
    dataset = opened(folder)
    before = len(dataset)
    (folder / "train-000003.tar").write_bytes(tars.archive(tars.photographs(24, 2)))
    assert len(opened(folder)) == before + 2
    dataset = opened(folder)
    path = folder / "train-000000.tar"
    data = bytearray(path.read_bytes())
    data[512 + 100] ^= 255  # in the first image
    path.write_bytes(data)
    with pytest.raises(IndexChangedError, match=r"train-000000\.tar/00000\.jpg"):
        everything(dataset)
    bad: dict[int, str] = {}
    batch = dataset.read(np.array([(0, 1), (0, 0)], np.int64), bad=bad)
    assert (list(bad), batch.columns["label"].values.tolist()) == ([1], [1, 0])
    index = opened(folder).index
    path.write_bytes(data[:-512])
    with pytest.raises(IndexChangedError, match=r"train-000000\.tar: changed.*bytes"):
        index.open(0)


def test_an_index_of_another_set_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    opened(folder / "train-000000.tar", index=tmp_path / "index")
    with pytest.raises(IndexChangedError, match="this is the index of"):
        opened(folder / "train-000001.tar", index=tmp_path / "index")


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


HOSTILE = {
    "../../x.jpg": "leaves the dataset",
    "/abs.jpg": "absolute",
    "a/../../y.jpg": "leaves the dataset",
    "inner.tar": "a tar inside a tar",
}


def test_hostile_members_are_refused_by_name_and_nothing_is_written_or_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "deep" / "set"
    root.mkdir(parents=True)
    monkeypatch.chdir(root)
    bomb = pickle.dumps(_Bomb())
    good = {"ok.jpg": JPEG, "./dotted.jpg": JPEG, "d.e/key.one.jpg": JPEG}
    passed = {f"ok.{e}": bomb for e in ("pth", "pkl", "pyd", "pt", "npz")}
    array = io.BytesIO()
    np.save(array, np.array([_Bomb()]), allow_pickle=True)
    opened_ones = {
        "bad.jpg": JPEG,
        "bad.npy": array.getvalue(),
        "worse.jpg": JPEG,
        "worse.txt": bomb,
    }
    hostile = dict.fromkeys(HOSTILE, JPEG)
    kinds = {"hard": b"1", "soft": b"2", "char": b"3", "block": b"4", "fifo": b"6"}
    links = b"".join(tars.special(f"{name}.jpg", kind) for name, kind in kinds.items())
    rest = {".hidden.jpg": JPEG, "__meta__": b""}
    plain = tars.archive({**good, **hostile, **passed, **opened_ones, **rest})
    (root / "a.tar").write_bytes(links + plain)
    dataset = opened(root)
    names, labels, data = everything(dataset)
    assert names == ["a.tar/ok.jpg", "a.tar/./dotted.jpg", "a.tar/d.e/key.one.jpg"]
    assert (labels, data) == ([], [JPEG, JPEG, JPEG])
    refused = quarantine(dataset.index.place)
    for name, reason in HOSTILE.items():
        assert reason in refused[f"a.tar/{name}"]
    for name in kinds:
        assert refused[f"a.tar/{name}.jpg"].startswith("a ")
    assert "array: an .npy file of dtype '|O'" in refused["a.tar/bad.jpg"]
    assert "caption: not UTF-8" in refused["a.tar/worse.jpg"]
    over = dataset.index.about.passed_over
    assert over == {"pth": 1, "pkl": 1, "pyd": 1, "pt": 1, "npz": 1, "(no key)": 2}
    assert os.listdir(root) == ["a.tar"]
    assert sorted(os.listdir(tmp_path)) == ["deep"]


def test_incomplete_samples_are_quarantined_with_the_reason(tmp_path: Path) -> None:
    first = [
        ("good.jpg", JPEG),
        ("good.cls", b" 7\n"),
        ("json.png", images.GOOD["one.png"]),
        ("json.json", b'{"label": 3}'),
        ("none.jpg", JPEG),
        ("word.jpg", JPEG),
        ("word.cls", b"dog"),
        ("huge.jpg", JPEG),
        ("huge.cls", b"9" * 19),
        ("two.jpg", JPEG),
        ("two.png", images.GOOD["one.png"]),
        ("twice.jpg", JPEG),
        ("twice.jpg", JPEG),
        ("split.jpg", JPEG),
        ("loose.cls", b"1"),
        ("torn.jpg", images.truncated(JPEG)),
        ("torn.cls", b"1"),
        ("film.gif", images.BAD["film.gif"][0]),
        ("film.cls", b"1"),
        ("deep.jpg", JPEG),
        ("deep.json", b"[" * 100_000),
    ]
    (tmp_path / "0.tar").write_bytes(tars.archive(first))
    (tmp_path / "1.tar").write_bytes(
        tars.archive({"split.cls": b"1", "a.jpg": JPEG, "a.cls": b"2"})
    )
    (tmp_path / "2.tar").write_bytes(tars.END)
    dataset = opened(tmp_path)
    names, labels, _ = everything(dataset)
    assert names == ["0.tar/good.jpg", "0.tar/json.png", "1.tar/a.jpg"]
    assert labels == [7, 3, 2]
    refused = quarantine(dataset.index.place)
    wanted = {
        "0.tar/none.jpg": "no label",
        "0.tar/word.jpg": "isn't an integer",
        "0.tar/huge.jpg": "isn't an integer",
        "0.tar/two.jpg": "two members of one key (jpg, png)",
        "0.tar/twice.jpg": "two members of one key (jpg, jpg)",
        "0.tar/split.jpg": "into one archive",
        "1.tar/split.cls": "whose image isn't in its archive",
        "0.tar/loose.cls": "whose image isn't in its archive",
        "0.tar/torn.jpg": "truncated",
        "0.tar/film.gif": "convert",
        "0.tar/deep.jpg": "isn't JSON",
        "2.tar": "without members",
    }
    assert set(refused) == set(wanted)
    for name, reason in wanted.items():
        assert reason in refused[name]
    assert dataset.index.about.quarantined == len(wanted)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("b.tar.gz", r"Decompress it \(gunzip"),
        ("b.tgz", r"Decompress it \(gunzip"),
        ("b.tar.zst", r"Decompress it .*unzstd"),
        ("b.tar.000", "Join the parts"),
        ("b.tar.partaa", "Join the parts"),
    ],
)
def test_an_archive_that_cannot_be_read_is_not_skipped(
    folder: Path, name: str, reason: str
) -> None:
    (folder / name).write_bytes(b"whatever")
    with pytest.raises(DatasetError, match=reason):
        opened(folder)
    for path in folder.glob("*.tar"):
        path.unlink()
    with pytest.raises(DatasetError, match=reason):
        opened(folder)


def test_a_torn_archive_among_whole_ones_stops_the_set(folder: Path) -> None:
    path = folder / "train-000001.tar"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DatasetError, match=r"train-000001\.tar: .*at byte"):
        opened(folder)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(DatasetNotFoundError, match=r"train-000001\.tar"):
        opened(folder)


def test_images_next_to_tar_files_need_a_format(folder: Path) -> None:
    images.class_folder(folder, samples=6)
    with pytest.raises(ConfigError, match='format="tar"'):
        opened(folder)
    assert opened(folder, format="tar").index.kind == "tar"
    assert opened(folder, format="folder").index.kind == "folder"
    with pytest.raises(DatasetNotFoundError, match=r"no file \*\.tar"):
        opened(folder / "class-0", format="tar")


CAPTIONS = ["ein Hund", "größer\n", "", "a dog, a cat"]


def test_captions_of_a_webdataset_are_read_with_their_images(tmp_path: Path) -> None:
    for number in range(2):
        files = {}
        for i in (2 * number, 2 * number + 1):
            files[f"{i:05d}.jpg"] = images.jpeg(i)
            files[f"{i:05d}.txt"] = CAPTIONS[i].encode()
            files[f"{i:05d}.json"] = json.dumps({"caption": CAPTIONS[i], "score": i / 2}).encode()
        (tmp_path / f"laion-{number}.tar").write_bytes(tars.archive(files))
    dataset = opened(tmp_path, fields=("image", "caption", "json.caption", "score", "id"))
    assert list(dataset.index.about.schema.items()) == [
        ("image", Image()),
        ("caption", Text()),
        ("json.caption", Text()),
        ("score", Value("float32")),
    ]
    batch = dataset.read(np.array([(1, 0), (0, 1), (0, 0), (1, 1)], np.int64))
    order = [2, 1, 0, 3]
    assert batch.ids.tolist() == order
    for field in ("caption", "json.caption"):
        samples = batch.columns[field].samples
        texts = [each if isinstance(each, str) else bytes(each).decode() for each in samples]
        assert texts == [CAPTIONS[i] for i in order]
    assert batch.columns["score"].values.tolist() == [i / 2 for i in order]
    assert [bytes(each) for each in batch.columns["image"].samples] == [
        images.jpeg(i) for i in order
    ]


def test_arrays_that_differ_between_archives_raise_an_error_with_a_remedy(tmp_path: Path) -> None:
    for number, dtype in enumerate(("f4", "f4", "f8")):
        files = {}
        for i in range(2):
            data = io.BytesIO()
            np.save(data, np.zeros(3 + number % 2, dtype))
            files[f"{i}.x.npy"] = data.getvalue()
        (tmp_path / f"{number}.tar").write_bytes(tars.archive(files))
    with pytest.raises(DatasetError) as caught:
        opened(tmp_path)
    for words in ("float32 of shape (3,) in 0.tar/0.x.npy", "float64 of shape (3,) in 2.tar/0.x.n"):
        assert words in str(caught.value)
    remedy = 'schema={"x": Array("float32", (None,))}'
    assert remedy in str(caught.value)
    dataset = opened(tmp_path, schema={"x": Array("float32", (None,))})
    assert (dataset.index.samples, dataset.index.about.quarantined) == (4, 2)
    fixed = opened(tmp_path, schema={"x": Array("float32", (3,))})
    reasons = quarantine(fixed.index.place)
    assert remedy in reasons["1.tar/0.x.npy"]
    assert "float64" in reasons["2.tar/0.x.npy"]
    assert fixed.read(np.array([(0, 0), (0, 1)], np.int64)).columns["x"].values.shape == (2, 3)


def test_a_set_without_images_needs_no_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setitem(sys.modules, "penstock.augment.verify", None)
    arrays = [np.arange(3 * i, dtype=">f4").reshape(i, 3) for i in range(6)]
    files = []
    for i, array in enumerate(arrays):
        data = io.BytesIO()
        np.save(data, np.asfortranarray(array) if i % 2 else array)
        files += [(f"{i}.feat.npy", data.getvalue()), (f"{i}.json", b'{"y": %d}' % i)]
    data = io.BytesIO()
    np.save(data, np.zeros((2, 3), "f4"))
    files += [("torn.feat.npy", data.getvalue()[:-1]), ("torn.json", b'{"y": 9}')]
    (tmp_path / "a.tar").write_bytes(tars.archive(files))
    dataset = Dataset(tmp_path, allow_left_out=1)
    index = dataset.index
    assert list(index.about.schema.items()) == [
        ("feat", Array("float32", (None, 3))),
        ("y", Value("int64")),
    ]
    batch = dataset.read(np.array([(0, row) for row in (5, 0, 3)], np.int64))
    feats = batch.columns["feat"]
    for place, i in enumerate((5, 0, 3)):
        assert np.array_equal(feats.sample(place), arrays[i])
        assert feats.sample(place).dtype == np.float32
    assert batch.columns["y"].values.tolist() == [5, 0, 3]
    refused = quarantine(index.place)
    assert list(refused) == ["a.tar/torn.feat.npy"]
    assert "takes 24 bytes, and 23 follow" in refused["a.tar/torn.feat.npy"]


SMALL = tars.archive({"a.jpg": JPEG, "a.cls": b"1", "b.jpg": images.jpeg(2), "b.cls": b"2"})
# Headers are a small part of the file, and damage there matters most.
PLACES = st.one_of(st.integers(0, len(SMALL) - 1), st.integers(0, 511), st.integers(1536, 2047))


@examples(120)
@given(
    flips=st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, len(SMALL))),
)
def test_any_damage_yields_samples_or_an_error(
    flips: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(SMALL)
    for at, value in flips:
        data[at] = value
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above, "set")
        folder.mkdir()
        Path(folder, "a.tar").write_bytes(data[:cut])
        try:
            names, labels, samples = everything(opened(folder))
        except PenstockError:
            return
        assert len(names) == len(samples) >= 1
        assert len(labels) in (0, len(names))
        assert os.listdir(folder) == ["a.tar"]
        assert set(os.listdir(above)) == {"set", "set.penstock"}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pack_of_tar_files_holds_every_sample_once(
    folder: Path, tmp_path: Path, shuffle: bool
) -> None:
    (folder / "train-000003.tar").write_bytes(
        tars.archive({"bad.jpg": b"no image", "bad.cls": b"1", "x/../y.jpg": JPEG})
    )
    wanted = by_tarfile(*sorted(folder.glob("*.tar"))[:3])
    options = {"shuffle": shuffle, "shard_bytes": 5000, "verify": images.verify, "workers": 2}
    summary = pack(folder, tmp_path / "whole", **options)  # type: ignore[arg-type]
    assert (summary.samples, summary.quarantined) == (24, 2)
    assert set(quarantine(tmp_path / "whole" / "_penstock")) == {
        "train-000003.tar/bad.jpg",
        "train-000003.tar/x/../y.jpg",
    }
    _, labels, data = everything(Dataset(tmp_path / "whole"))
    if not shuffle:
        assert (labels, data) == wanted[1:]
    assert sorted(zip(labels, data, strict=True)) == sorted(zip(*wanted[1:], strict=True))
    # Two ranks write the same bytes in any order of work.
    for rank in (1, 0):
        pack(folder, tmp_path / "ranks", rank=rank, size=2, **options)  # type: ignore[arg-type]
    for path in (tmp_path / "whole").glob("*.arrow"):
        assert (tmp_path / "ranks" / path.name).read_bytes() == path.read_bytes()


def test_a_pack_may_lie_next_to_the_selected_tar_files(folder: Path) -> None:
    picked = folder / "train-{000000..000001}.tar"
    assert pack(picked, folder / "packed", verify=images.verify).samples == 16
    with pytest.raises(ConfigError, match="dst"):
        pack(folder, folder / "packed", verify=images.verify)


def test_a_killed_pack_of_tar_files_resumes(folder: Path, tmp_path: Path) -> None:
    calls = random.Random(0).randrange(2, 4)
    seen = 0

    def dies(samples: object) -> object:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise KeyboardInterrupt
        return images.verify(samples)  # type: ignore[arg-type]

    options = {"shard_bytes": 4000, "workers": 1}
    with pytest.raises(KeyboardInterrupt):
        pack(folder, tmp_path / "killed", verify=dies, **options)  # type: ignore[arg-type]
    pack(folder, tmp_path / "killed", verify=images.verify, **options)  # type: ignore[arg-type]
    pack(folder, tmp_path / "whole", verify=images.verify, **options)  # type: ignore[arg-type]
    for path in (tmp_path / "whole").glob("*.arrow"):
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()
