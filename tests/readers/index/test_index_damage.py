"""Damage to a dataset's cache folder, including indexes: a job continues with the right bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import warnings
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.cache import IndexChangedError, PenstockWarning
from penstock.cache.disk import DiskCache
from penstock.readers import Dataset, pack
from penstock.readers.formats import VERSION
from penstock.readers.index import read_manifest
from tests import images, tars
from tests.servers import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.readers.fieldtypes import SampleBatch

MIB = 2**20
SAMPLES = 60


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.readers.formats.candidates.PART_BYTES", 6000)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, tar files and a pack, without indexes next to them."""
    root = tmp_path_factory.mktemp("data")
    images.class_folder(root / "folder", samples=SAMPLES)
    tars.tar_folder(root / "tar", samples=SAMPLES, archives=5)
    pack(root / "folder", root / "pack", shuffle=False, shard_bytes=6000, verify=images.verify)
    return root


Told = list[tuple[int, bytes, int]]


class Job:
    """A job that reads a dataset through a cache folder, all of it in each epoch."""

    def __init__(self, source: Path, root: Path, *, url: str | None = None) -> None:
        self.cache = DiskCache(root, max_bytes=32 * MIB)
        files = None
        if url is None:
            files = fsspec.filesystem("file", skip_instance_cache=True)
        self.dataset = Dataset(url or source, cache=self.cache, filesystem=files)
        self.dataset.open(verify=images.verify)
        sizes = enumerate(self.dataset.index.sizes.tolist())
        self.rows = np.array([(shard, row) for shard, n in sizes for row in range(n)], np.int64)

    def let_go(self) -> None:
        """Read all samples of all shards, which are opened again."""
        self.dataset.release(range(len(self.dataset.index.sizes)))

    def epoch(self) -> Told:
        return contents_of(self.dataset.read(self.rows))

    def close(self) -> None:
        self.dataset.close()
        self.cache.close()


def contents_of(batch: SampleBatch) -> Told:
    labels = batch.columns["label"].values.tolist()
    return list(
        zip(batch.ids.tolist(), map(bytes, batch.columns["image"].samples), labels, strict=True)
    )


@pytest.fixture(params=["folder", "tar"])
def source(request: pytest.FixtureRequest, data: Path, tmp_path: Path) -> Path:
    """A copy of the data, because some tests change it."""
    copy: Path = shutil.copytree(data / request.param, tmp_path / "data" / request.param)
    return copy


def place_of(root: Path) -> Path:
    (place,) = (root / "indexes").iterdir()
    return place


def sidecars(root: Path) -> list[Path]:
    return sorted((place_of(root) / "sidecars").iterdir())


def flip(path: Path, rng: random.Random) -> None:
    """Change bytes in place, as a faulty disk does."""
    with path.open("r+b", buffering=0) as file:
        size = path.stat().st_size
        at = rng.randrange(size) if size else 0
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


@contextlib.contextmanager
def warned_once() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        yield
    (warning,) = report
    assert warning.category is PenstockWarning
    assert "its index in the cache" in str(warning.message)
    assert "penstock index" not in str(warning.message)  # it is repaired without


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _another(path: Path) -> None:
    """A valid file of ours with other content."""
    here = path.parent.parent if path.parent.name == "sidecars" else path.parent
    others = [here / "manifest.arrow", *sorted((here / "sidecars").iterdir())]
    path.write_bytes(next(other for other in others if other != path).read_bytes())


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": lambda path: flip(path, random.Random(3)),
    "cut": _cut,
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "a folder": _folder,
    "another's": _another,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_an_index_in_the_cache_is_repaired_during_a_job(
    source: Path, tmp_path: Path, damage: str
) -> None:
    """Damage the index's parts and its manifest: the parts are repaired at once, the manifest when
    the dataset is opened again."""
    root = tmp_path / "cache"
    job = Job(source, root)
    wanted = job.epoch()
    whole = {
        path: path.read_bytes() for path in [*sidecars(root), place_of(root) / "manifest.arrow"]
    }
    assert len(whole) >= 4
    with warned_once():
        for _ in range(2):
            for path in whole:
                if path.is_file():
                    DAMAGES[damage](path)
            job.let_go()
            assert job.epoch() == wanted
    job.close()
    if damage != "a folder":
        parts = {path: data for path, data in whole.items() if path.name != "manifest.arrow"}
        assert {path: path.read_bytes() for path in parts} == parts
        Job(source, root).close()
        assert {path: path.read_bytes() for path in whole} == whole


def test_an_index_is_repaired_without_its_folder_or_with_another_index_in_it(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    job = Job(source, root)
    wanted = job.epoch()
    with warned_once():
        shutil.rmtree(root / "indexes")
        job.let_go()
        assert job.epoch() == wanted
        shutil.rmtree(place_of(root) / "sidecars")
        (tmp_path / "away").mkdir()
        (place_of(root) / "sidecars").symlink_to(tmp_path / "away")
        job.let_go()
        assert job.epoch() == wanted
    assert not list((tmp_path / "away").iterdir())
    job.close()


def test_changed_data_under_a_damaged_index_is_an_error(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    job = Job(source, root)
    job.epoch()
    for path in sidecars(root):
        flip(path, random.Random(1))
    for path in source.rglob("*.*"):
        path.write_bytes(path.read_bytes() + bytes(10240))
    job.let_go()
    with warned_once(), pytest.raises(IndexChangedError, match="has changed since it was indexed"):
        job.epoch()
    job.close()


def test_a_touched_file_doesnt_prevent_the_repair(data: Path, tmp_path: Path) -> None:
    """If only the time of a file changed, the rebuilt part stays in memory each time."""
    source = shutil.copytree(data / "folder", tmp_path / "folder")
    root = tmp_path / "cache"
    job = Job(source, root)
    wanted = job.epoch()
    image = source / "class-0" / "0000.jpg"
    os.utime(image, ns=(7, 7))
    with warned_once():
        for path in sidecars(root):
            flip(path, random.Random(1))
        for _ in range(2):
            job.let_go()
            assert job.epoch() == wanted
    job.close()


def test_two_jobs_and_a_third_that_opens_a_damaged_index(source: Path, tmp_path: Path) -> None:
    """Repair all parts at once: a running build isn't waited for, and the same bytes are written
    back."""
    root, rng = tmp_path / "cache", random.Random(5)
    first, second = Job(source, root), Job(source, root)
    wanted = first.epoch()
    assert second.epoch() == wanted
    found: list[Told] = []

    def opens() -> None:
        job = Job(source, root)
        found.append(job.epoch())
        job.close()

    def reads(job: Job) -> None:
        job.let_go()
        found.append(job.epoch())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        for _ in range(3):
            for path in [*sidecars(root), place_of(root) / "manifest.arrow"]:
                flip(path, rng)
            plays = [
                threading.Thread(target=opens),
                threading.Thread(target=reads, args=(first,)),
                threading.Thread(target=reads, args=(second,)),
            ]
            for play in plays:
                play.start()
            for play in plays:
                play.join(40)
    assert found == [wanted] * 9
    first.close()
    second.close()


@pytest.mark.parametrize("bit", range(8))
def test_a_flip_in_a_manifests_version_isnt_a_newer_one(
    data: Path, tmp_path: Path, bit: int
) -> None:
    root = tmp_path / "cache"
    Job(data / "folder", root).close()
    path = place_of(root) / "manifest.arrow"
    whole = path.read_bytes()
    at = whole.rindex(b'"version": %d' % VERSION) + len(b'"version": ')
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    job = Job(data / "folder", root)
    assert len(job.epoch()) == SAMPLES
    job.close()
    assert path.read_bytes() == whole
    read_manifest(os.fsencode(path), remedy="")


def test_no_index_is_built_from_a_damaged_fill(data: Path, tmp_path: Path) -> None:
    """The data of a fill have no checksums yet, and a tar file's headers and labels never have."""
    root = tmp_path / "cache"
    job = Job(data / "tar", root)
    wanted = job.epoch()
    job.close()
    shutil.rmtree(root / "blobs")
    job = Job(data / "tar", root)
    job.dataset.read(job.rows[::5])
    job.close()
    parts = sorted((root / "fills").glob("*.part"))
    assert parts
    for path in parts:
        held = bytearray(path.read_bytes())
        held[::512] = bytes(len(held[::512]))
        path.write_bytes(held)
    flip(sidecars(root)[0], random.Random(1))
    job = Job(data / "tar", root)
    with warned_once():
        assert job.epoch() == wanted
    job.close()


# -- flips of any file


def _flip_any(root: Path, rng: random.Random) -> str:
    """Flip a bit of one file; all positions are equally likely."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            top = path if path.parent == root else path.parent
            found.setdefault(top, []).append(path)
    path = rng.choice(found[rng.choice(list(found))])
    flip(path, rng)
    return str(path.relative_to(root))


def _play(make: Callable[[], Job], root: Path, *, flips: int, seed: int, live: bool) -> None:
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        job = make()
        wanted = job.epoch()
        assert len(wanted) == SAMPLES
        for number in range(flips):
            if not live:
                job.close()
            what = _flip_any(root, rng)
            if not live:
                job = make()
            elif number % 3 == 2:  # another opens it meanwhile
                other = make()
                assert other.epoch() == wanted, what
                other.close()
            job.let_go()
            assert job.epoch() == wanted, what
        job.close()


@pytest.fixture
def makes(data: Path, tmp_path: Path) -> Iterator[Callable[[str], Callable[[], Job]]]:
    """A job on a dataset of a kind. "remote" is on a server, with its index next to it."""
    beside = shutil.copytree(data / "folder", tmp_path / "served" / "set")
    with Dataset(beside) as dataset:
        dataset.open(verify=images.verify)
    root = tmp_path / "cache"
    with serving(beside.parent) as server:

        def maker(kind: str) -> Callable[[], Job]:
            url = f"{server.url}/set" if kind == "remote" else None
            return lambda: Job(beside if url else data / kind, root, url=url)

        yield maker


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["folder", "tar", "pack", "remote"])
def test_flips_of_any_file(makes: Any, tmp_path: Path, kind: str, live: bool) -> None:
    _play(makes(kind), tmp_path / "cache", flips=6, seed=1, live=live)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(2, 4))
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("kind", ["folder", "tar", "pack", "remote"])
def test_many_flips_of_any_file(
    makes: Any, tmp_path: Path, kind: str, live: bool, seed: int
) -> None:
    _play(makes(kind), tmp_path / "cache", flips=40, seed=seed, live=live)
