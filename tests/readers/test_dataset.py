"""Every container, mode and thread reads the same samples; damage is found and named."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import (
    ClosedError,
    ConfigError,
    CorruptSampleError,
    CorruptShardError,
    DatasetError,
    FetchError,
    IndexChangedError,
    PenstockWarning,
    ReadError,
    ordered,
)
from penstock.readers import Dataset, pack
from penstock.readers.files import mapped_files
from penstock.readers.reading import open_shards
from tests import images
from tests.files import flip, uploaded
from tests.properties import examples
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.fieldtypes import SampleBatch

SAMPLES = 24
SHARD_BYTES = 3000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with its index, and an unshuffled pack of it in some shards."""
    root = tmp_path_factory.mktemp("built")
    images.class_folder(root / "set", samples=SAMPLES)
    Dataset(root / "set").open(verify=images.verify)
    pack(root / "set", root / "pack", shuffle=False, shard_bytes=SHARD_BYTES, verify=images.verify)
    return root


@pytest.fixture
def own(built: Path, tmp_path: Path) -> Path:
    """Make a copy that a test may damage."""
    shutil.copytree(built / "pack", tmp_path / "pack")
    images.class_folder(tmp_path / "set", samples=SAMPLES)
    Dataset(tmp_path / "set").open(verify=images.verify)
    return tmp_path


def contents(batch: SampleBatch) -> list[bytes]:
    return [bytes(sample) for sample in batch.columns["image"].samples]


def first_byte(shard: Path) -> int:
    """Return a position in the first image's scan in a shard's file."""
    return shard.read_bytes().index(b"\xff\xd8\xff") + 40


@pytest.mark.parametrize("kind", ["set", "pack"])
@pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
def test_samples_are_the_files_bytes(built: Path, kind: str, mode: str) -> None:
    with Dataset(built / kind) as dataset:
        batch = dataset.read(rows_of(dataset), mode=mode)  # type: ignore[arg-type]
        names = Dataset(built / "set").names(range(SAMPLES))
        assert contents(batch) == [(built / "set" / name).read_bytes() for name in names]
        assert batch.ids.tolist() == list(range(SAMPLES))
        assert batch.columns["label"].values.tolist() == [int(name[6]) for name in names]
        assert batch.columns["label"].values.dtype == np.int64
        assert batch.columns["image"].dims.dtype == np.int32
        sizes = [images.verify([sample])[0] for sample in batch.encoded("image").encoded]
        assert batch.columns["image"].dims.tolist() == [[f.height, f.width] for f in sizes]  # type: ignore[union-attr]
        assert all(
            s.dtype == np.uint8 and not s.flags.writeable for s in batch.columns["image"].samples
        )


@examples(40)
@given(picks=st.lists(st.integers(0, SAMPLES - 1), max_size=40))
def test_rows_are_returned_in_the_requested_order(built: Path, picks: list[int]) -> None:
    for kind in ("set", "pack"):
        with Dataset(built / kind) as dataset:
            rows = rows_of(dataset)
            whole = contents(dataset.read(rows))
            batch = dataset.read(rows[np.array(picks, np.int64)])
            assert batch.ids.tolist() == picks
            assert contents(batch) == [whole[i] for i in picks]
            assert batch.columns["image"].dims.shape == (len(picks), 2)


def test_no_rows(built: Path) -> None:
    with Dataset(built / "pack") as dataset:
        batch = dataset.read(np.empty((0, 2), np.int64))
    assert (len(batch.ids), batch.columns["image"].samples, batch.columns["image"].dims.shape) == (
        0,
        [],
        (0, 2),
    )


def test_many_threads_read_at_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_shards, "OPEN_SHARDS", 2)
    with Dataset(built / "pack") as dataset:
        rows = rows_of(dataset)
        whole = contents(dataset.read(rows))
        orders = [np.random.default_rng(i).permutation(SAMPLES) for i in range(40)]
        batches = ordered(lambda o: contents(dataset.read(rows[o])), orders, workers=4, ahead=8)
        for order, batch in zip(orders, batches, strict=True):
            assert batch == [whole[i] for i in order]


def test_open_maps_are_bounded_and_hold_no_descriptor(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shards, "OPEN_SHARDS", 2)

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("/pack/shard-")

    gc.collect()
    before = maps()
    with Dataset(built / "pack") as dataset:
        assert len(dataset.index.sizes) > 4
        held = [
            dataset.read(rows_of(dataset)[i : i + 1]).columns["image"].samples[0]
            for i in range(SAMPLES)
        ]
        # Shards only: files that other tests left open may close meanwhile.
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [link for link in links if "/pack/shard-" in os.path.realpath(link)]
        last = bytes(held[0])
        del held[1:]
        gc.collect()
        assert maps() - before <= 3
    assert bytes(held[0]) == last  # delivered views outlive close()
    del held
    gc.collect()
    assert maps() == before


@pytest.mark.parametrize(("factor", "advised"), [(-1.0, 3), (float("inf"), 2)])
def test_batches_are_read_ahead_while_the_last_ones_were_cold(
    built: Path, monkeypatch: pytest.MonkeyPatch, factor: float, advised: int
) -> None:
    """Every batch counts as cold, or none does: then two are advised at the start and no more."""
    from penstock.readers import local_place

    calls: list[int] = []
    monkeypatch.setattr(mapped_files, "COLD_FACTOR", factor)
    monkeypatch.setattr(mapped_files, "disk_reads", itertools.count(1).__next__)
    monkeypatch.setattr(mapped_files, "ADVISED_BATCHES", 2)
    real = local_place.MappedFile.advise
    monkeypatch.setattr(
        local_place.MappedFile,
        "advise",
        lambda *args: (calls.append(1), real(*args)),  # type: ignore[func-returns-value]
    )
    with Dataset(built / "pack") as dataset:
        row = rows_of(dataset)[:1]
        whole = [contents(dataset.read(row)) for _ in range(3)]
    assert whole[0] == whole[1] == whole[2]
    assert len(calls) == advised


@pytest.mark.parametrize(
    ("fields", "there"),
    [(None, ("image", "label")), (("image", "label", "id"), None), (["label"], None)],
)
def test_fields(built: Path, fields: object, there: tuple[str, ...] | None) -> None:
    dataset = Dataset(built / "pack", fields=fields)  # type: ignore[arg-type]
    assert dataset.fields == (there or tuple(fields))  # type: ignore[arg-type]
    dataset.open()
    assert len(dataset) == SAMPLES


def test_fields_that_do_not_exist(built: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mask.*'image', 'label', 'id'"):
        Dataset(built / "pack", fields=("image", "mask")).open()
    images.write_folder(tmp_path / "flat", {"1.jpg": images.jpeg(1)})
    flat = Dataset(tmp_path / "flat", fields=("image", "label"))
    with pytest.raises(ConfigError, match="sub-folder"):
        flat.open(verify=images.verify)
    assert Dataset(tmp_path / "flat").fields == ("image",)


@pytest.mark.parametrize("bad", [(99, 0), (-1, 0), (0, 999), (0, -1)])
def test_rows_that_do_not_exist(built: Path, bad: tuple[int, int]) -> None:
    with Dataset(built / "pack") as dataset:
        with pytest.raises(ConfigError, match="rows"):
            dataset.read(np.array([bad], np.int64))
        with pytest.raises(ConfigError, match="ids"):
            dataset.names([SAMPLES])


def test_names_of_a_pack_are_those_of_its_source(built: Path) -> None:
    with Dataset(built / "pack") as dataset, Dataset(built / "set") as source:
        assert sorted(dataset.names(range(SAMPLES))) == sorted(source.names(range(SAMPLES)))


def test_damaged_names_of_a_pack_are_replaced_by_shard_and_row(own: Path) -> None:
    with Dataset(own / "pack") as dataset:
        (name,) = dataset.names([0])
    shard = own / "pack" / "shard-000000.arrow"
    flip(shard, shard.read_bytes().index(name.encode()))
    with Dataset(own / "pack") as dataset:
        assert dataset.names([0, 1]) == ["shard-000000.arrow[0]", "shard-000000.arrow[1]"]


@pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
def test_a_flipped_bit_in_a_pack_is_found_and_named(own: Path, mode: str) -> None:
    shard = own / "pack" / "shard-000001.arrow"
    flip(shard, first_byte(shard))
    with Dataset(own / "pack") as dataset:
        wrong = int(dataset.index.starts[1])
        with pytest.raises(CorruptSampleError, match=r"shard-000001\.arrow\[0\]") as caught:
            dataset.read(rows_of(dataset), mode=mode)  # type: ignore[arg-type]
        assert caught.value.sample_id == wrong
        good = np.delete(rows_of(dataset), wrong, axis=0)
        assert len(dataset.read(good).columns["image"].samples) == SAMPLES - 1


@pytest.mark.parametrize(
    ("damage", "error", "word"),
    [("torn", CorruptShardError, "truncated"), ("gone", CorruptShardError, "missing"),
     ("longer", CorruptShardError, "changed"), ("other", CorruptShardError, "not a shard")],
)  # fmt: skip
def test_a_damaged_shard_names_itself_and_the_remedy(
    own: Path, damage: str, error: type[Exception], word: str
) -> None:
    shard = sorted((own / "pack").glob("*.arrow"))[-1]
    data = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        changed = {"torn": data[:-9], "longer": data + b"x", "other": b"x" * len(data)}
        shard.write_bytes(changed[damage])
    with Dataset(own / "pack") as dataset, pytest.raises(error, match=word) as caught:
        dataset.read(rows_of(dataset))
    assert shard.name in str(caught.value)
    assert "penstock pack" in str(caught.value)


def test_a_shard_that_shrinks_while_open_is_an_error_by_pread(own: Path) -> None:
    with Dataset(own / "pack") as dataset:
        dataset.read(rows_of(dataset), mode="pread")
        os.truncate(own / "pack" / "shard-000000.arrow", 100)
        with pytest.raises(CorruptShardError, match="truncated"):
            dataset.read(rows_of(dataset), mode="pread")


@examples(80)
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_a_shard_with_a_flipped_byte_is_refused_or_reads_the_same(
    built: Path, place: float, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "flipped-shard"
    if not root.exists():
        shutil.copytree(built / "pack", root)
    shard = root / "shard-000000.arrow"
    whole = (built / "pack" / shard.name).read_bytes()
    data = bytearray(whole)
    data[int(place * len(data))] ^= change
    shard.unlink()  # not in place: another run may have mapped it
    shard.write_bytes(data)
    with Dataset(built / "pack") as dataset:
        expected = dataset.read(rows_of(dataset))
    with Dataset(root) as dataset:
        try:
            got = dataset.read(rows_of(dataset))
        except DatasetError:
            return
    assert contents(got) == contents(expected)
    assert got.columns["image"].dims.tolist() == expected.columns["image"].dims.tolist()
    assert got.columns["label"].values.tolist() == expected.columns["label"].values.tolist()


@pytest.mark.parametrize("change", ["grown", "shrunk", "gone", "same size"])
def test_a_file_that_changed_in_place_is_named(own: Path, change: str) -> None:
    victim = own / "set" / "class-1" / "0004.jpg"
    data = victim.read_bytes()
    dataset = Dataset(own / "set")
    dataset.open()
    if change == "gone":
        victim.unlink()
    else:
        end = data[:-1] + b"\x00"
        changed = {"grown": data + b"x", "shrunk": data[:-1], "same size": end}
        victim.write_bytes(changed[change])
    with pytest.raises(IndexChangedError, match=r"class-1/0004\.jpg") as caught:
        dataset.read(rows_of(dataset))
    assert "penstock index" in str(caught.value)


def test_an_unreadable_file_is_named(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, *args: object, **kwargs: object) -> int:
        if isinstance(path, bytes) and path.endswith(b"0004.jpg"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    with Dataset(built / "set") as dataset:
        rows = rows_of(dataset)
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ReadError, match=r"class-1/0004\.jpg.*Permission denied"):
            dataset.read(rows)


@pytest.fixture
def url(built: Path) -> Iterator[str]:
    """The URL of a remote copy of the pack."""
    with uploaded(built / "pack") as url:
        yield url


def test_downloads_without_a_cache_are_removed_with_the_dataset(url: str) -> None:
    dataset = Dataset(url)
    with pytest.warns(PenstockWarning, match="cache="):
        dataset.open()
    dataset.read(rows_of(dataset))
    folder = dataset._scratch.disk_cache().path
    assert os.listdir(folder)
    dataset.close()
    dataset.close()
    assert not os.path.exists(folder)
    forgotten = Dataset(url)
    with pytest.warns(PenstockWarning, match="cache="):
        forgotten.open()
    folder = forgotten._scratch.disk_cache().path
    del forgotten
    gc.collect()
    assert not os.path.exists(folder)


def test_a_damaged_remote_object_is_named(own: Path, tmp_path: Path) -> None:
    shard = own / "pack" / "shard-000001.arrow"
    flip(shard, first_byte(shard))
    with (
        uploaded(own / "pack") as url,
        Dataset(url, cache=tmp_path / "cache") as dataset,
        pytest.raises(CorruptSampleError, match=url),
    ):
        dataset.read(rows_of(dataset))


def test_a_missing_remote_object_is_named(url: str, tmp_path: Path) -> None:
    missing = f"{url}/shard-000002.arrow"
    fsspec.filesystem("memory").rm(missing)
    with (
        Dataset(url, cache=tmp_path / "cache") as dataset,
        pytest.raises(FetchError, match=re.escape(missing)) as caught,
    ):
        dataset.read(rows_of(dataset))
    assert caught.value.uri == missing


def test_after_close_nothing_can_be_read(built: Path) -> None:
    dataset = Dataset(built / "pack")
    rows = rows_of(dataset)
    dataset.close()
    with pytest.raises(ClosedError):
        dataset.read(rows)


def test_the_repr_hides_secrets() -> None:
    dataset = Dataset("https://me:word@host/set?sig=abc", storage_options={"token": "hush"})
    assert repr(dataset) == "Dataset('https://host/set')"


@pytest.mark.parametrize(
    "wrong", [{"format": "zip"}, {"fields": []}, {"fields": ["id", "id"]}, {"cache": 7}]
)
def test_wrong_arguments(built: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Dataset(built / "pack", **wrong)  # type: ignore[arg-type]


def test_odd_names_are_read_and_shown_on_one_line(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path / "odd")
    os.makedirs(root + b"/cl\xffass")
    for i, name in enumerate([b"new\nline.jpg", b"\xfe.jpg"]):
        with open(root + b"/cl\xffass/" + name, "wb") as file:
            file.write(images.jpeg(i))
    with Dataset(root) as dataset:
        dataset.open(verify=images.verify)
        batch = dataset.read(rows_of(dataset))
        assert contents(batch) == [images.jpeg(0), images.jpeg(1)]
        names = dataset.names(range(2))
        assert names == [r"cl\xffass/new\nline.jpg", r"cl\xffass/\xfe.jpg"]
        pack(root, tmp_path / "pack", verify=images.verify)
        assert (tmp_path / "pack" / "_penstock" / "quarantine.jsonl").read_bytes() == b""
    with Dataset(tmp_path / "pack") as packed:
        assert [os.fsencode(name) for name in packed.classes] == [b"cl\xffass"]
