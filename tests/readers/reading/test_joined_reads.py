"""Test that samples of several local datasets, read by one pass, equal those of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import mix
from penstock.cache import ClosedError, CorruptSampleError, IndexChangedError
from penstock.readers import Blocks, Dataset, concat
from penstock.readers.packing import pack
from penstock.readers.reading import JoinedReader
from tests.files import flip
from tests.images import class_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = (9, 4, 14)


@pytest.fixture(params=["folder", "pack"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Dataset]]:
    """Three sets of images with classes, in several shards each if they are packed."""
    found = []
    for number, size in enumerate(SIZES):
        folder = class_folder(tmp_path / f"images-{number}", samples=size, classes=2)
        if request.param == "pack":
            pack(folder, tmp_path / f"pack-{number}", shard_bytes=4000)
            folder = tmp_path / f"pack-{number}"
        found.append(Dataset(str(folder)))
    yield found
    for each in found:
        each.close()


def rows_of(source: Any) -> Any:
    return source.rows(np.random.default_rng(1).permutation(sum(SIZES)))


def images(batch: Any) -> list[bytes]:
    return [bytes(each) for each in batch.columns["image"].samples]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of samples of each read by one pass."""
    found, real = list[int](), JoinedReader.read

    def counted(self: JoinedReader, rows: Any, **options: Any) -> Any:
        found.append(len(rows))
        return real(self, rows, **options)

    monkeypatch.setattr(JoinedReader, "read", counted)
    return found


@pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
def test_samples_are_those_of_each(parts, mode, monkeypatch):
    both, blocks, together = concat(parts), Blocks(), reads(monkeypatch)
    rows = rows_of(both)
    wanted, bad = both.read(rows, mode=mode), dict[int, str]()
    found = both.read(rows, mode=mode, blocks=blocks, bad=bad)
    assert together == [sum(SIZES)]
    assert not bad
    assert found.ids.tolist() == wanted.ids.tolist() == both.ids(rows).tolist()
    assert images(found) == images(wanted)
    assert found.columns["image"].dims.tolist() == wanted.columns["image"].dims.tolist()
    assert found.columns["label"].values.tolist() == wanted.columns["label"].values.tolist()
    assert found.bytes_read == wanted.bytes_read
    counted = [part.traffic().bytes_disk for part in parts]
    assert sum(counted) == pytest.approx(2 * found.bytes_read, abs=len(parts))
    assert min(counted) > 0


def test_samples_with_wrong_bytes_are_named(parts, tmp_path, monkeypatch):
    both, blocks = concat(parts), Blocks()
    rows, together = rows_of(both), reads(monkeypatch)
    image = images(both.read(both.rows(np.array([SIZES[0] + 2]))))[0]
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.relative_to(tmp_path).parts[0].endswith("-1"):
            place = path.read_bytes().find(image)
            if place >= 0:
                flip(path, place + len(image) // 2)
    bad = dict[int, str]()
    found = both.read(rows, blocks=blocks, bad=bad)
    (row,) = bad
    assert "CRC-32C" in bad[row]
    assert found.ids[row] == SIZES[0] + 2
    assert not len(found.columns["image"].samples[row])
    with pytest.raises((CorruptSampleError, IndexChangedError)) as caught:
        both.read(rows, blocks=blocks)
    if isinstance(caught.value, CorruptSampleError):
        assert caught.value.sample_id == SIZES[0] + 2
    assert len(together) == 2
    parts[2].close()
    with pytest.raises(ClosedError):
        both.read(rows, blocks=blocks)


def test_a_mixture_measures_its_parts_now_and_then(parts, monkeypatch):
    mixture = mix(dict(zip("abc", parts, strict=True)), fields=("image", "label", "part"))
    rows, blocks, together = rows_of(mixture), Blocks(), reads(monkeypatch)
    for _ in range(40):
        batch = mixture.read(rows, blocks=blocks)
        assert batch.loads is not None
        by_part = np.zeros((3, 3))
        np.add.at(by_part, batch.loads.parts, batch.loads.amounts)
        assert by_part[:, 0].tolist() == [*SIZES]
        assert by_part[:, 1].sum() == pytest.approx(batch.bytes_read)
        assert by_part[:, 2].min() > 0
        assert np.bincount(batch.columns["part"].values).tolist() == [*SIZES]  # type: ignore[attr-defined]
    assert len(together) == 38


def test_parts_of_datasets_are_read_apart(parts, monkeypatch):
    mixture = mix({"a": parts[0].subset([1, 2, 3]), "b": parts[1]})
    together = reads(monkeypatch)
    rows = mixture.rows(np.array([2, SIZES[0], SIZES[0] + 1]))
    batch = mixture.read(rows, blocks=Blocks())
    assert batch.ids.tolist() == mixture.ids(rows).tolist()
    assert not together
