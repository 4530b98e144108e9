"""The verdict names each of ten real bottlenecks, planted one at a time, and no other.

Nothing is emulated in the figures: slow servers answer slowly, images are as large or progressive
as they say, other programs sit on a core. Plants are strong, so that a busy machine can't hide
them.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from penstock.augment import Map, check_recipe, imagenet_eval, imagenet_train
from penstock.cache import DiskCache
from penstock.cache.base import usable_cores
from penstock.pipeline import DataLoader
from penstock.pipeline.bench import measure_ceilings
from penstock.pipeline.report import CoreSpeeds, diagnose, probes
from penstock.readers import Dataset, pack
from tests.servers import Faults, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.pipeline import Statistics

# Who waits for whom is what the clock decides; `make test` has the judgement (test_diagnosis) and
# the facts that it is made from (test_facts).
pytestmark = pytest.mark.timed

SMALL = imagenet_eval(32, resize=36)
QUIET = threading.Event()


def wait(seconds: float) -> None:
    """A step of an accelerator: the CPU has nothing to do with it."""
    QUIET.wait(seconds)


def run(
    dataset: Dataset, steps: int, step: Callable[[], None] = lambda: None, **more: Any
) -> Statistics:
    """Return a loader's statistics after some steps."""
    asked: dict[str, Any] = {"batch_size": 16, "shuffle": True, "drop_last": True, "seed": 7}
    asked |= {"augment": SMALL, "num_workers": min(2, usable_cores()), **more}
    with dataset, DataLoader(dataset, **asked) as loader:
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in itertools.islice(endless, steps):
            step()
        return loader.statistics()


def write(folder: Path, height: int, width: int, *, count: int, **options: Any) -> Path:
    """A folder of JPEGs of one size, some of them alike."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 / width, y * 255 / height, (x + y) % 256], axis=-1)
    noise = rng.normal(0, 8, (height, width, 1))
    image = Image.fromarray(np.clip(picture + noise, 0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    for number in range(count):
        (folder / f"{number:04d}.jpg").write_bytes(buffer.getvalue())
    return folder


@pytest.fixture(autouse=True)
def quiet_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs on the machine of the tests are no plant of ours."""
    numbers = tuple(sorted(os.sched_getaffinity(0)))
    even = CoreSpeeds(numbers=numbers, speeds=(1.0,) * len(numbers))
    monkeypatch.setattr(probes, "core_speeds", lambda: even)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline JPEGs of about the size that the recipe can show."""
    return write(tmp_path_factory.mktemp("planted") / "photographs", 300, 320, count=96)


def test_slow_model(pack: Path) -> None:
    found = run(Dataset(pack), 8, lambda: wait(0.25))
    assert (found.limit, found.cause) == ("model", "slow-model")
    assert "The model is the limit" in found.verdict


def test_slow_decode(photographs: Path) -> None:
    found = run(Dataset(photographs), 12, augment=imagenet_train(224), num_workers=1)
    assert (found.limit, found.cause) == ("decode", "slow-decode")
    assert "with 1 decode thread" in found.verdict
    assert "num_workers=" in found.verdict


def test_oversized_images(tmp_path: Path) -> None:
    large = write(tmp_path / "large", 3000, 4000, count=4, quality=60)
    found = run(Dataset(large), 5, augment=imagenet_train(224), batch_size=2)
    assert (found.limit, found.cause) == ("decode", "oversized")
    assert "12 megapixels" in found.verdict
    assert f"`penstock pack {large} DST --short-side 256`" in found.verdict


def test_progressive_jpegs(tmp_path: Path) -> None:
    some = write(tmp_path / "progressive", 300, 320, count=96, progressive=True)
    found = run(Dataset(some), 12, augment=imagenet_train(224))
    assert (found.limit, found.cause) == ("decode", "progressive")
    assert "100% of the images are progressive" in found.verdict
    assert f"`penstock pack {some} DST --baseline`" in found.verdict


@pytest.fixture
def hogs() -> Iterator[int]:
    """Programs that never rest, on the last core. Each in a session of its own: the kernel shares
    cores among sessions first."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        for _ in range(5)
    ]
    try:
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()  # it has moved
        yield core
    finally:
        for one in running:
            one.kill()
            one.communicate()


@pytest.mark.skipif(usable_cores() < 2, reason="a core is slow beside another")
def test_one_slow_core(photographs: Path, hogs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # What other programs do on the other cores in the half second of measuring hides the
    # difference: one of some jobs must see it.
    for _ in range(4):
        found = run(Dataset(photographs), 12, augment=imagenet_train(224), num_workers=2)
        if found.cause == "slow-core":
            break
    assert (found.limit, found.cause) == ("decode", "slow-core")
    assert f"Core {hogs} is slow" in found.verdict
    assert "Stop or move the other programs on it" in found.verdict


def count_for(seconds: float) -> None:
    """Pure Python: the GIL is let go only when others have waited for it."""
    end, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        total += 1


def sleep_with_the_gil(seconds: float) -> None:
    """Native code that forgets to let it go."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.parametrize("hog", [count_for, sleep_with_the_gil])
def test_gil_hog_in_the_training_loop(pack: Path, hog: Callable[[float], None]) -> None:
    found = run(Dataset(pack), 24, lambda: hog(0.08))
    assert (found.limit, found.cause) == ("python", "gil")
    assert "holds Python's GIL" in found.verdict
    assert "a process of its own" in found.verdict


def test_a_training_loop_that_only_waits_holds_no_gil(pack: Path) -> None:
    found = run(Dataset(pack), 24, lambda: wait(0.08))
    assert found.gil_late < 0.3
    assert found.cause != "gil"


def test_slow_disk(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read that isn't of the page cache takes 20 ms, as on a disk that is far too busy."""
    quick = os.preadv

    def slow(*arguments: Any) -> int:
        wait(0.02)
        return quick(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    found = run(Dataset(pack), 8, read="pread")
    assert (found.limit, found.cause) == ("disk", "slow-disk")
    assert "bytes from the disk" in found.verdict
    assert "NVMe" in found.verdict


def slow_function(label: Any) -> Any:
    wait(0.004)
    return label


def test_slow_function_in_the_recipe(pack: Path) -> None:
    mapped = [Map(slow_function, "label"), *SMALL]
    found = run(Dataset(pack), 12, augment=mapped)
    assert (found.limit, found.cause) == ("map", "slow-map")
    assert "Map(slow_function)" in found.verdict
    assert "processes=" in found.verdict


QUICK = {"retry_timeout": 20.0, "connect_timeout": 2.0, "read_timeout": 5.0}


@dataclass(frozen=True)
class Far:
    """The faults of the server of a pack, and the limit of the cache."""

    faults: Faults
    max_bytes: str | int | None


def run_far(folder: Path, cache: Path, far: Far, steps: int, **more: Any) -> Statistics:
    with serving(folder.parent, far.faults) as server:
        kept = DiskCache(cache, max_bytes=far.max_bytes) if far.max_bytes else None
        url = f"{server.url}/{folder.name}"
        found = run(Dataset(url, cache=kept, storage_options=QUICK), steps, **more)
        if kept is not None:
            kept.close()
    return found


SLOW = Faults(latency_s=0.05, bytes_per_s=100_000)


def test_slow_remote(pack: Path, tmp_path: Path) -> None:
    found = run_far(pack, tmp_path / "cache", Far(SLOW, "64MiB"), 10)
    assert (found.limit, found.cause) == ("remote", "slow-remote")
    assert "The remote is the limit" in found.verdict
    assert "penstock warm" in found.verdict


def test_small_cache(pack: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in pack.glob("*.arrow"))
    # Small packs: what the books take is more than half of them.
    far = Far(SLOW, size // 3 + 400 * 2**10)
    found = run_far(pack, tmp_path / "cache", far, 44)
    assert (found.limit, found.cause) == ("cache", "small-cache")
    assert "The cache's size is the limit" in found.verdict
    assert "max_bytes=" in found.verdict


def test_tiny_shards(folder: Path, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    pack(str(folder), str(tiny), seed=3, shard_bytes="4KiB")
    found = run_far(tiny, tmp_path / "cache", Far(Faults(latency_s=0.05), "64MiB"), 8)
    assert (found.limit, found.cause) == ("remote", "tiny-shards")
    assert "The shards are tiny" in found.verdict
    assert "--shard-bytes 64MiB`" in found.verdict


def test_a_remote_that_keeps_up_is_no_limit(pack: Path, tmp_path: Path) -> None:
    far = Far(Faults(), "64MiB")
    found = run_far(pack, tmp_path / "cache", far, 12)
    assert found.limit not in ("cache", "disk")
    assert found.cause not in ("tiny-shards", "small-cache", "gil")


def test_none_of_the_image_plants_is_seen_in_plain_photographs(photographs: Path) -> None:
    found = run(Dataset(photographs), 12, augment=imagenet_train(224), num_workers=2)
    assert (found.limit, found.cause) == ("decode", "slow-decode")


def test_with_ceilings_the_cause_stays_and_gets_a_prediction(tmp_path: Path) -> None:
    """As in `penstock bench`."""
    some = write(tmp_path / "progressive", 300, 320, count=96, progressive=True)
    recipe = imagenet_train(224)
    found = run(Dataset(some), 12, augment=recipe)
    with Dataset(some) as dataset:
        checked = check_recipe(recipe, images=dataset.index.images["image"])
        ceilings = measure_ceilings(
            dataset, {"image": checked}, batch_size=16, threads=2, seconds=0.3
        )
    told = diagnose(replace(found.facts, ceilings=ceilings))
    assert (told.limit, told.cause) == ("decode", "progressive")
    assert told.of_ceiling is not None
    assert told.predicted_samples_per_s is not None
    assert told.predicted_samples_per_s > found.samples_per_s
    assert ceilings.progressive is not None
    assert ceilings.progressive.times > 1
    assert "decoding and augmenting alone reached" in told.verdict
    assert "of the work, measured" in told.basis


def test_what_a_remote_gives_alone_is_told_apart_from_what_the_cache_has(
    pack: Path, tmp_path: Path
) -> None:
    with serving(pack.parent, SLOW) as server:
        cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
        url = f"{server.url}/{pack.name}"
        found = run(Dataset(url, cache=cache, storage_options=QUICK), 10)
        with Dataset(url, cache=cache, storage_options=QUICK) as dataset:
            checked = check_recipe(SMALL, images=dataset.index.images["image"])
            ceilings = measure_ceilings(
                dataset, {"image": checked}, batch_size=16, threads=2, seconds=0.2
            )
        cache.close()
    told = diagnose(replace(found.facts, ceilings=ceilings))
    assert (told.limit, told.cause) == ("remote", "slow-remote")
    assert ceilings.remote is not None
    assert ceilings.read is not None  # what the run has fetched
    assert ceilings.read.samples_per_s > ceilings.remote.samples_per_s
    assert "fetching alone reached" in told.verdict
