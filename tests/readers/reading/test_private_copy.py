"""The checked bytes are the decoded ones, even if the file changes in between."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock import warm
from penstock.augment import imagenet_eval
from penstock.cache import DiskCache
from penstock.pipeline import DataLoader
from penstock.readers import Dataset, build_index
from tests import images, tars
from tests.readers.remote_sets import rows_of
from tests.servers import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.readers.fieldtypes import SampleBatch

SAMPLES = 24
KINDS = ("pack", "tar", "cached pack", "cached folder", "cached tar")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from penstock.readers import pack

    root = tmp_path_factory.mktemp("sources")
    images.class_folder(root / "folder", samples=SAMPLES)
    tars.tar_folder(root / "tar", samples=SAMPLES, archives=2)
    for name in ("folder", "tar"):
        build_index(root / name, verify=images.verify)
    pack(str(root / "folder"), str(root / "pack"), verify=images.verify)
    return {name: root / name for name in ("folder", "tar", "pack")}


class Place:
    """A dataset, and the files that hold its samples."""

    def __init__(self, url: Any, folder: Path, cache: DiskCache | None) -> None:
        self.url, self._folder, self.cache = url, folder, cache
        self._before: dict[Path, bytes] = {}

    def open(self) -> Dataset:
        return Dataset(self.url, fields=("image", "id"), cache=self.cache)

    def flip(self, batch: SampleBatch) -> int:
        """Flip a bit in the middle of each sample, in place; return how many were found."""
        found = 0
        for path in sorted(self._folder.rglob("*")):
            if not path.is_file():
                continue
            data = path.read_bytes()
            for sample in batch.columns["image"].samples:
                at = data.find(bytes(sample))
                if at >= 0:
                    found += 1
                    self._before.setdefault(path, data)
                    with path.open("r+b") as file:
                        file.seek(at + len(sample) // 2)
                        file.write(bytes([data[at + len(sample) // 2] ^ 4]))
        return found

    def restore(self) -> None:
        for path, data in self._before.items():
            with path.open("r+b") as file:
                file.write(data)
        self._before.clear()


@pytest.fixture
def place(request: Any, sources: dict[str, Path], tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    with contextlib.ExitStack() as stack:
        if kind.startswith("cached "):
            source = sources[kind.removeprefix("cached ")]
            server = stack.enter_context(serving(source.parent))
            cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
            stack.callback(cache.close)
            made = Place(f"{server.url}/{source.name}", tmp_path / "cache", cache)
            warm(made.url, cache=cache)  # no fill may rename a file meanwhile
        else:
            made = Place(sources[kind], sources[kind], None)
        yield made
        if made.cache is None:
            made.restore()


@pytest.mark.parametrize("place", KINDS, indirect=True)
@pytest.mark.parametrize("options", [{}, {"mode": "copy"}, {"mode": "pread"}, {"mode": "mmap"}])
def test_a_bit_that_flips_after_the_check_is_not_delivered(
    place: Place, options: dict[str, Any]
) -> None:
    with place.open() as dataset:
        rows = rows_of(dataset)
        wanted = list(map(bytes, dataset.read(rows).columns["image"].samples))
        batch = dataset.read(rows, **options)
        assert place.flip(batch) == SAMPLES
        delivered = list(map(bytes, batch.columns["image"].samples))
    if options.get("mode") == "mmap":  # views show the file as it is now
        assert all(mine != clean for mine, clean in zip(delivered, wanted, strict=True))
    else:
        assert delivered == wanted
    assert all(not sample.flags.writeable for sample in batch.columns["image"].samples)


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_a_loaders_pixels_are_those_that_were_checked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_images() -> torch.Tensor:
        recipe = imagenet_eval(32, resize=36)
        with place.open() as dataset, DataLoader(dataset, SAMPLES, augment=recipe) as loader:
            ((pixels, ids),) = list(loader)
        assert ids.tolist() == list(range(SAMPLES))
        copied: torch.Tensor = pixels.clone()
        return copied

    wanted = all_images()
    read, flipped = Dataset.read, []

    def flips(self: Dataset, rows: Any, **options: Any) -> SampleBatch:
        batch = read(self, rows, **options)
        flipped.append(place.flip(batch))
        return batch

    monkeypatch.setattr(Dataset, "read", flips)
    assert torch.equal(all_images(), wanted)
    assert flipped == [SAMPLES]


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_a_bit_that_flips_before_the_check_is_found(place: Place) -> None:
    with place.open() as dataset:
        rows = rows_of(dataset)
        clean = dataset.read(rows)
        wanted = list(map(bytes, clean.columns["image"].samples))
        place.flip(clean)
        bad: dict[int, str] = {}
        delivered = list(map(bytes, dataset.read(rows, bad=bad).columns["image"].samples))
        if place.cache is None:
            assert sorted(bad) == list(range(SAMPLES))
        else:  # fetched again
            assert (bad, delivered) == ({}, wanted)
            assert dataset.traffic().refetched > 0
