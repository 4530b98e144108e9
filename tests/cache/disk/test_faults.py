"""Test the whole cache in processes that are killed, crowded, or have a full disk or a wrong clock.

Every child compares each byte that it receives with the object (exit code 3 for a wrong one). Every
test compares the space that the folder uses on disk with the catalogue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache import DiskCache, PenstockWarning
from penstock.readers import Dataset, build_index
from tests import images, tars
from tests.cache_jobs import CONTEXT, Job, Reader, finish, replace, run, start, write_objects
from tests.files import flip
from tests.readers.remote_sets import rows_of, samples_of
from tests.servers import Faults, serving
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess
    from typing import Any


MIB = 2**20
SIZES = {f"d/{number:02d}.bin": 40_000 + 4093 * number for number in range(20)}
SIZE = sum(SIZES.values())
AMPLE = 16 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("remote")
    write_objects(folder, SIZES)
    with serving(folder) as running:
        yield running


@pytest.fixture
def job(server: Any, tmp_path: Path) -> Job:
    objects = tuple(SIZES.items())
    return Job(url=server.url, folder=str(tmp_path / "c"), max_bytes=AMPLE, objects=objects)


def disk_bytes(folder: str) -> int:
    """Return the disk space of the files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def unlinked_bytes(folder: str, pids: list[int]) -> int:
    """Return the disk space of deleted files that one of these processes still maps."""
    found: dict[str, int] = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if folder in line and line.endswith("(deleted)"):
                span, _, _, device, inode = line.split()[:5]
                low, high = (int(end, 16) for end in span.split("-"))
                found[f"{device} {inode}"] = high - low
    return sum(found.values())


def books(folder: str) -> tuple[int, int, dict[str, int]]:
    """Return (bytes in use, their sum over the blobs, blobs by state) from the catalogue."""
    with sqlite3.connect(f"{folder}/catalogue.db") as db:
        (used,) = db.execute(
            "SELECT COALESCE(MAX(value), 0) FROM facts WHERE name = 'used'"
        ).fetchone()
        (total,) = db.execute("SELECT COALESCE(SUM(disk), 0) FROM blobs").fetchone()
        states = dict(db.execute("SELECT state, COUNT(*) FROM blobs GROUP BY state"))
    db.close()
    return int(str(used).split()[0]), int(total), states  # a checksum stands behind it


def assert_in_order(folder: str, blobs: int) -> None:
    """Behind a job that ran to its end: all blobs whole, nothing else, and the books are right."""
    used, total, states = books(folder)
    assert states == ({"ready": blobs} if blobs else {})
    assert used == total
    names = {name: sorted(os.listdir(f"{folder}/{name}")) for name in ("blobs", "fills", "trash")}
    assert (len(names["blobs"]), names["fills"], names["trash"]) == (blobs, [], [])
    on_disk = sum(os.stat(f"{folder}/blobs/{n}").st_blocks * 512 for n in names["blobs"])
    assert on_disk == total


@contextlib.contextmanager
def counted(server: Any) -> Iterator[list[int]]:
    """Bytes that the server sends inside, as the one element of a list, once left."""
    before, sent = server.bytes_sent, [0]
    yield sent
    sent[0] = server.bytes_sent - before


def killed_then_finished(job: Job, victim: BaseProcess) -> None:
    """Behind a killed child: a second job serves right bytes, completes, leaves no litter."""
    victim.join(PATIENCE_S)
    assert victim.exitcode in (-signal.SIGKILL, 0), victim.exitcode
    ((outcome),) = finish(replace(job, kill_at=0))
    assert (outcome.exit_code, outcome.wrong) == (0, 0)
    assert_in_order(job.folder, len(SIZES))


def test_a_job_reads_right_bytes_and_leaves_a_cache_in_order(server: Any, job: Job) -> None:
    with counted(server) as sent:
        (first,) = finish(replace(job, rounds=2))
    assert (first.exit_code, first.wrong) == (0, 0)
    assert sent[0] == SIZE
    assert_in_order(job.folder, len(SIZES))
    with counted(server) as sent:
        (second,) = finish(replace(job, rounds=2, span_bytes=5000, seed=1))
    assert (second.exit_code, second.wrong, sent[0]) == (0, 0, 0)


def changes_of(job: Job) -> int:
    """Return how often a whole run changes the disk."""
    low = CONTEXT.Value("i", 0)
    process = CONTEXT.Process(target=_count, args=(job, low))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    return int(low.value)


def _count(job: Job, most: Any) -> None:
    from tests.cache_jobs import count_changes

    def see(number: int) -> None:
        most.value = number

    count_changes(see)
    run(job)


def _killed_before(server: Any, job: Job, calls: list[int]) -> None:
    for call in calls:
        one = replace(job, folder=f"{job.folder}-{call}", kill_at=call)
        with counted(server) as sent:
            killed_then_finished(one, start(one))
        # At most the fills in flight are fetched again.
        in_flight = 2 * max(SIZES.values())
        assert sent[0] <= SIZE + in_flight, call


@pytest.mark.parametrize("span_bytes", [None, 16384])
@pytest.mark.parametrize("of_ranges", [False, True])
def test_killed_before_some_changes_of_the_disk(
    server: Any, job: Job, span_bytes: int | None, of_ranges: bool
) -> None:
    job = replace(job, span_bytes=span_bytes, of_ranges=of_ranges)
    total = changes_of(replace(job, folder=f"{job.folder}-count"))
    assert total > 5 * len(SIZES)
    rng = np.random.default_rng(total)
    _killed_before(server, job, sorted({1, 2, 3, total, *rng.integers(1, total, 10).tolist()}))


@pytest.mark.grid
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("span_bytes", [None, 16384])
@pytest.mark.parametrize("of_ranges", [False, True])
def test_killed_before_every_change_of_the_disk(
    server: Any, job: Job, span_bytes: int | None, of_ranges: bool, part: int
) -> None:
    job = replace(job, span_bytes=span_bytes, of_ranges=of_ranges)
    total = changes_of(replace(job, folder=f"{job.folder}-count"))
    _killed_before(server, job, list(range(1 + part, total + 1, 10)))


def _killed_while_rebuilding(server: Any, job: Job, damage: str, step: int) -> None:
    """Kill what rebuilds a damaged catalogue before some changes of the disk: the next rebuilds it,
    with all blobs and one warning at most."""
    assert finish(job)[0].exit_code == 0
    if damage == "noise":
        Path(job.folder, "catalogue.db").write_bytes(np.random.default_rng(3).bytes(16384))
    else:  # its rows can be read
        with sqlite3.connect(f"{job.folder}/catalogue.db") as db:
            db.execute("PRAGMA user_version = 77")
        db.close()

    def copy(name: str) -> Job:
        shutil.copytree(job.folder, f"{job.folder}-{name}")
        return replace(job, folder=f"{job.folder}-{name}")

    total = changes_of(copy("count"))
    assert total > len(SIZES)
    for call in range(1, total + 1, step):
        one = copy(str(call))
        with counted(server) as sent:
            victim = start(replace(one, kill_at=call))
            victim.join(PATIENCE_S)
            assert victim.exitcode == -signal.SIGKILL
            (outcome,) = finish(one)
        assert (outcome.exit_code, outcome.wrong, sent[0]) == (0, 0, 0), call
        assert len(outcome.warnings) <= 1, outcome.warnings
        assert_in_order(one.folder, len(SIZES))


@pytest.mark.parametrize("damage", ["noise", "version"])
def test_killed_while_it_rebuilds_the_catalogue(server: Any, job: Job, damage: str) -> None:
    _killed_while_rebuilding(server, job, damage, step=9)


@pytest.mark.grid
@pytest.mark.parametrize("damage", ["noise", "version"])
def test_killed_before_every_change_while_it_rebuilds(server: Any, job: Job, damage: str) -> None:
    _killed_while_rebuilding(server, job, damage, step=1)


def _killed_at_random(server: Any, job: Job, kills: int, *, seed: int = 0) -> None:
    """Kill a job over and over in one folder, until it has nothing left to do; then in another."""
    assert finish(replace(job, folder=f"{job.folder}-start"))[0].exit_code == 0
    began_s = time.monotonic()
    assert finish(replace(job, folder=f"{job.folder}-whole"))[0].exit_code == 0
    took_s = time.monotonic() - began_s
    rng = np.random.default_rng(seed)
    killed = folders = 0
    while killed < kills:
        one = replace(job, folder=f"{job.folder}-{folders}")
        before, folders = killed, folders + 1
        with counted(server) as sent:
            while killed < kills:
                victim = start(replace(one, seed=killed, span_bytes=(None, 16384)[killed % 2]))
                victim.join(float(rng.uniform(0, took_s)))
                victim.kill()
                victim.join(PATIENCE_S)
                if victim.exitcode != -signal.SIGKILL:
                    assert victim.exitcode == 0, "wrong bytes"
                    break
                killed += 1
            (last,) = finish(one)
        assert (last.exit_code, last.wrong) == (0, 0)
        assert_in_order(one.folder, len(SIZES))
        # A killed process loses what it had in flight: 8 samples, or one blob of a fill.
        assert sent[0] <= SIZE + (killed - before) * max(*SIZES.values(), 8 * 16384 + 8 * 8192)


def test_killed_at_random_moments(server: Any, job: Job) -> None:
    _killed_at_random(server, job, 25)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(1, 5))
def test_killed_at_random_moments_100_times(server: Any, job: Job, seed: int) -> None:
    _killed_at_random(server, job, 25, seed=seed)


def _crowd(server: Any, job: Job, rounds: int) -> None:
    for number in range(rounds):
        one = replace(job, folder=f"{job.folder}-{number}")
        crowd = [
            replace(one, seed=8 * number + i, span_bytes=(None, 9000)[i % 2]) for i in range(8)
        ]
        with counted(server) as sent:
            outcomes = finish(*crowd)
        assert [(each.exit_code, each.wrong) for each in outcomes] == [(0, 0)] * 8
        assert sent[0] <= 1.05 * SIZE
        assert_in_order(one.folder, len(SIZES))


def test_eight_processes_fetch_each_byte_once(server: Any, job: Job) -> None:
    _crowd(server, job, 1)


@pytest.mark.grid
def test_eight_processes_fetch_each_byte_once_in_20_rounds(server: Any, job: Job) -> None:
    _crowd(server, job, 20)


def _watch(folder: str, processes: list[BaseProcess], seconds: float = PATIENCE_S) -> int:
    """The most that a folder took of the disk while these ran, looked at every 10 ms."""
    most, end_s = 0, time.monotonic() + seconds
    pids = [process.pid for process in processes if process.pid]
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < end_s, "the jobs hang"
        most = max(most, disk_bytes(folder) + unlinked_bytes(folder, pids))
        processes[0].join(0.01)
    return max(most, disk_bytes(folder))


def test_the_limit_is_never_passed_by_two_datasets(job: Job) -> None:
    limit = SIZE // 2 + MIB
    halves = job.objects[::2], job.objects[1::2]
    jobs = [
        replace(
            job, max_bytes=limit, objects=halves[i % 2], group=f"set{i % 2}", seed=i, rounds=3,
            span_bytes=(None, 9000)[i // 2],
        )
        for i in range(4)
    ]  # fmt: skip
    running = [start(one) for one in jobs]
    most = _watch(job.folder, running)
    assert [process.exitcode for process in running] == [0] * 4
    assert most <= limit
    assert disk_bytes(f"{job.folder}/blobs") > limit // 4


def test_a_dataset_twice_the_cache_keeps_what_fits(server: Any, job: Job) -> None:
    limit = SIZE // 2 + MIB
    with counted(server) as sent:
        (outcome,) = finish(replace(job, max_bytes=limit, rounds=3, span_bytes=16384))
    assert (outcome.exit_code, outcome.wrong) == (0, 0)
    kept = disk_bytes(f"{job.folder}/blobs")
    assert sent[0] <= 1.03 * (SIZE + 2 * (SIZE - kept))


# -- disks that fail


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own; skips where this user may not mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def reads_with_one_warning(job: Job) -> list[str]:
    """Read the dataset twice in this process: the right bytes, and one warning."""
    with pytest.warns(PenstockWarning) as report, Reader(job) as reader:
        wrong = sum(bad for number in range(2) for _, bad in reader.epoch(number))
    assert wrong == 0
    texts = [str(each.message) for each in report]
    assert len(texts) == 1, texts
    assert "can't be used" in texts[0]
    return texts


def test_a_full_disk_costs_one_warning(server: Any, job: Job, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1500k") as disk, counted(server) as sent:
        reads_with_one_warning(replace(job, folder=str(disk / "c"), span_bytes=16384))
    assert sent[0] <= 2.1 * SIZE


def test_a_disk_without_inodes_costs_one_warning(job: Job, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=28") as disk:
        reads_with_one_warning(replace(job, folder=str(disk / "c"), span_bytes=16384))


@pytest.mark.parametrize("before", ["new", "filled"])
def test_a_read_only_disk_costs_one_warning(job: Job, tmp_path: Path, before: str) -> None:
    with small_disk(tmp_path / "disk", "size=64m") as disk:
        job = replace(job, folder=str(disk / "c"), span_bytes=16384)
        if before == "filled":
            assert finish(job)[0].exit_code == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        reads_with_one_warning(job)


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_another_users_folder_costs_one_warning_and_is_left_alone(job: Job, mode: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        job = replace(job, folder=f"{place}/c")
        assert finish(job)[0].exit_code == 0
        os.chmod(job.folder, mode)
        before = sorted(path.name for path in Path(job.folder).rglob("*"))
        (outcome,) = finish(replace(job, user=NOBODY, span_bytes=16384))
        assert (outcome.exit_code, outcome.wrong) == (0, 0)
        (text,) = outcome.warnings
        assert "another user" in text or "ermission" in text
        assert sorted(path.name for path in Path(job.folder).rglob("*")) == before


def test_a_clock_that_was_a_year_ahead_does_no_harm(server: Any, job: Job) -> None:
    assert finish(job)[0].exit_code == 0
    ahead_s = time.time() + 365 * 86400
    with sqlite3.connect(f"{job.folder}/catalogue.db") as db:
        db.execute("UPDATE blobs SET used = ?", (ahead_s,))
    db.close()
    for path in Path(job.folder).rglob("*"):
        os.utime(path, (ahead_s, ahead_s))
    other = replace(job, url=job.url, group="other", objects=job.objects[:10], seed=5)
    with counted(server) as sent:
        outcomes = finish(other, replace(job, seed=6))
    assert [(each.exit_code, each.wrong) for each in outcomes] == [(0, 0)] * 2
    assert sent[0] == 0


# -- bytes that change in the cache folder


def flip_any(path: Path, rng: np.random.Generator) -> None:
    """Invert one bit of a file, at random."""
    flip(path, int(rng.integers(0, path.stat().st_size)), 1 << int(rng.integers(0, 8)))


@pytest.fixture(scope="module")
def kinds(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Return datasets with indexes next to them: (folder to serve, path below it)."""
    root = tmp_path_factory.mktemp("kinds")
    images.class_folder(root / "set", samples=120)
    tars.tar_folder(root / "tars", samples=120, archives=6)
    for url in (root / "set", root / "tars"):
        build_index(url, verify=images.verify)
    return {"pack": (pack, ""), "folder": (root, "/set"), "tar": (root, "/tars")}


@pytest.mark.filterwarnings("ignore:.*a part of its index in the cache can.t be used")
@pytest.mark.parametrize("mode", ["copy", "pread"])
@pytest.mark.parametrize("kind", ["pack", "folder", "tar"])
def test_200_flipped_bits_are_never_delivered(
    kinds: dict[str, tuple[Path, str]], tmp_path: Path, kind: str, mode: Any
) -> None:
    rng = np.random.default_rng(200)
    served, below = kinds[kind]
    with Dataset(f"{served}{below}") as local:
        rows = rows_of(local)
        wanted = samples_of(local.read(rows))
    cache = DiskCache(tmp_path / "c", max_bytes=AMPLE)
    with serving(served) as server, contextlib.closing(cache):
        url = f"{server.url}{below}"
        with Dataset(url, cache=cache) as remote:
            assert samples_of(remote.read(rows, mode=mode)) == wanted
            for number in range(200):
                blobs = sorted((tmp_path / "c" / "blobs").iterdir())
                flip_any(blobs[int(rng.integers(len(blobs)))], rng)
                some = rng.choice(len(rows), 16, replace=False)
                assert samples_of(remote.read(rows[some], mode=mode)) == [wanted[i] for i in some]
                if number % 20 == 0:
                    remote.release(range(len(remote.index.sizes)))
            assert samples_of(remote.read(rows, mode=mode)) == wanted
            assert remote.traffic().refetched > 10
        for path in (tmp_path / "c" / "blobs").iterdir():  # without a live job
            flip_any(path, rng)
        with Dataset(url, cache=cache) as remote:
            assert samples_of(remote.read(rows, mode=mode)) == wanted


# The promise is 10 s; on a busy machine the end alone is looked at.
@pytest.mark.parametrize("patience_s", [PATIENCE_S, pytest.param(10.0, marks=pytest.mark.timed)])
def test_a_killed_owner_delays_others_by_less_than_10_seconds(
    server: Any, job: Job, patience_s: float
) -> None:
    one = replace(job, objects=job.objects[:1])
    server.reset()
    server.faults = Faults(p=1.0, kinds=("hang",), also="/d/00.bin", times=1)
    try:
        owner = start(one)
        while owner.is_alive() and not server.requests_of["/d/00.bin"]:
            owner.join(0.01)
        waiting = start(replace(one, seed=1))
        waiting.join(0.5)
        assert waiting.is_alive()
        owner.kill()
        owner.join(PATIENCE_S)
        waiting.join(patience_s)
        assert waiting.exitcode == 0
    finally:
        server.faults = Faults()
        server.reset()
    assert_in_order(job.folder, 1)


def test_the_limit_holds_while_jobs_are_killed(job: Job) -> None:
    limit = SIZE // 2 + MIB
    halves = job.objects[::2], job.objects[1::2]
    rng = np.random.default_rng(7)
    most = 0
    for number in range(4):
        jobs = [
            replace(
                job,
                max_bytes=limit,
                objects=halves[i % 2],
                group=f"set{i % 2}",
                seed=10 * number + i,
                span_bytes=(None, 9000)[i // 2],
            )
            for i in range(4)
        ]
        running = [start(one) for one in jobs]
        victim = running[number % 4]
        victim.join(float(rng.uniform(0, 0.3)))
        victim.kill()
        most = max(most, _watch(job.folder, running))
        codes = {process.exitcode for process in running if process is not victim}
        assert codes == {0}
    assert most <= limit
    (last,) = finish(replace(job, max_bytes=limit))
    assert (last.exit_code, last.wrong) == (0, 0)
    used, total, _ = books(job.folder)
    assert used == total


def test_strange_files_in_the_folder_do_no_harm(job: Job) -> None:
    assert finish(job)[0].exit_code == 0
    for name in ("blobs", "fills", "trash", "unverified"):
        (Path(job.folder) / name / "README.txt").write_text("what is this folder?")
        (Path(job.folder) / name / "sub").mkdir()
    (outcome,) = finish(replace(job, seed=1))
    assert (outcome.exit_code, outcome.wrong) == (0, 0)
    assert outcome.warnings == ()
