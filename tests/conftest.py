"""Datasets that many tests read. They are built once per session, and no test changes them."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

import tests.properties  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

pytest_plugins = ["tests.watchdog"]

settings.load_profile("short")  # `--hypothesis-profile long` replaces it

SAMPLES = 203  # prime-ish: few batch and world sizes divide it
CLASSES = 7
ROOT = Path(__file__).resolve().parents[1]
SHORT_ROOMS = {"augment", "cache", "readers"}
LONGEST = {  # more than ten seconds of work and waits each
    "benchmarks/test_bench_gpu.py",
    "benchmarks/test_benchmarks.py",
    "docs/test_pages.py",
    "docs/test_site.py",
    "pipeline/torch_data/test_state.py",
    "pipeline/torch_data/test_streams.py",
    "readers/packing/test_dask.py",
    "test_examples.py",
    "test_watchdog.py",
}


def photograph(number: int) -> NDArray[np.uint8]:
    """Return a small picture with gradients, a shape and noise, of its own size:
    uint8, (h, w, 3)."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(40, 120, 2)
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 / width, y * 255 / height, (x + y) * 1.0], axis=-1)
    picture[(x - width / 2) ** 2 + (y - height / 2) ** 2 < (10 + number % 20) ** 2] = rng.integers(
        0, 255, 3
    )
    return np.clip(picture + rng.normal(0, 8, picture.shape), 0, 255).astype(np.uint8)


def jpeg(number: int, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(photograph(number)).save(buffer, "JPEG", quality=88, **options)
    return buffer.getvalue()


def write_photographs(folder: Path, samples: int = SAMPLES, classes: int = CLASSES) -> Path:
    for number in range(samples):
        place = folder / f"class-{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05d}.jpg").write_bytes(jpeg(number))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest test files first, then those that start whole jobs: a long file at the end
    keeps only one core busy."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        path = item.path.relative_to(ROOT / "tests")
        return str(path) not in LONGEST, path.parts[0] in SHORT_ROOMS

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that garbage collections skip them, which saves most of a
    second, and forked workers need not copy them when they exit."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    from tests import warm  # the plugin above, that it imports, is rewritten by pytest first

    warm.close()


@pytest.fixture(scope="session", autouse=True)
def _a_cache_directory_of_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache directory instead of the user's, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder of 203 small photographs in 7 classes."""
    return write_photographs(tmp_path_factory.mktemp("data") / "photographs")


@pytest.fixture(scope="session")
def pack(folder: Path) -> Path:
    """Return a shuffled pack of the folder, of about 20 shards."""
    return _pack(folder, "pack", shuffle=True)


@pytest.fixture(scope="session")
def ordered_pack(folder: Path) -> Path:
    """Return an unshuffled pack of the folder, with the same sample ids."""
    return _pack(folder, "ordered-pack", shuffle=False)


def _pack(folder: Path, name: str, *, shuffle: bool) -> Path:
    from penstock.readers import pack

    destination = folder.parent / name
    pack(str(folder), str(destination), shuffle=shuffle, seed=3, shard_bytes="32KiB")
    return destination
