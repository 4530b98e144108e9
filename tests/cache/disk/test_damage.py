"""Damage to anything in a cache folder, without and with a live job: the right bytes,
no ended job, at most one warning, and the limit holds."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sqlite3
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, PenstockWarning
from penstock.cache.base import BlobSource, BlobSpans, FetchPolicy, Segment, blob_key
from penstock.cache.blobs import Remote
from penstock.cache.disk import CacheFolder, DiskCache, FolderLayout, admin, boot_id, format_text
from penstock.cache.fetch import Fetcher
from penstock.pipeline.cli import main
from penstock.readers import Dataset
from tests import images, tars
from tests.stores import MemoryStore
from tests.watchdog import on_the_watchdogs_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20
BLOBS, BLOB_BYTES = 24, 50_000
NOTES = ["format.json", "boot", "limit", "catalogue.db"]


def a_store() -> MemoryStore:
    rng = random.Random(7)
    return MemoryStore({f"o{number:02d}": rng.randbytes(BLOB_BYTES) for number in range(BLOBS)})


class Played:
    """A job over a cache: reads everything in batches, and checks it as a dataset does."""

    def __init__(self, root: Path, *, max_bytes: int | None = 8 * MIB, group: str = "g") -> None:
        self.store = a_store()
        cache = DiskCache.at(root) if max_bytes is None else DiskCache(root, max_bytes=max_bytes)
        self.cache = cache
        policy = FetchPolicy(retry_timeout_s=5.0, range_bytes=16_384)
        self.remote = Remote(Fetcher(self.store, policy=policy), cache, group=group, label="x")
        self.sources = [self.source(name) for name in self.store.objects]
        self.job = self.remote.join([s.key for s in self.sources], [BLOB_BYTES] * BLOBS)
        self.blobs: dict[str, Any] = {}

    def source(self, name: str) -> BlobSource:
        segment = Segment(path=name, size_bytes=BLOB_BYTES, version=None)
        key = blob_key(scope=self.store.scope, uri=name, version="1")
        return BlobSource(key=key, uri=name, segments=(segment,), size_bytes=BLOB_BYTES)

    def read(self, source: BlobSource, start: int, end: int) -> None:
        """A sample, dropped and read again if its bytes are wrong, as `Dataset.read` does it."""
        wanted = self.store.objects[source.uri][start:end]
        for _ in range(3):
            blob = self.blobs.get(source.key) or self.remote.open(source)
            self.blobs[source.key] = blob
            (got,) = self.remote.load([BlobSpans(blob=blob, starts=[start], ends=[end])])
            if got[0].tobytes() == wanted:
                return
            del self.blobs[source.key]
            self.remote.drop(source, inode=getattr(blob, "inode", None))
        raise AssertionError(f"{source.uri}: wrong bytes that come again")

    def epoch(self, rng: random.Random, *, whole: float = 0.5) -> None:
        for source in rng.sample(self.sources, BLOBS):
            start = rng.randrange(BLOB_BYTES - 1)
            self.read(source, start, rng.randint(start + 1, BLOB_BYTES))
            if rng.random() < whole:
                self.remote.fill(source)
        assert self.job is not None
        self.job.refresh()

    def close(self) -> None:
        self.blobs.clear()
        self.remote.close()
        self.cache.close()


@contextlib.contextmanager
def playing(root: Path, *, most: int = 1, **more: Any) -> Iterator[Played]:
    """A job, whose warnings are counted."""
    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        played = Played(root, **more)
        try:
            yield played
        finally:
            played.close()
    assert len(report) <= most, [str(one.message) for one in report]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache that holds all but three blobs, one of these begun."""
    root = tmp_path / "cache"
    with playing(root, most=0) as job:
        for source in job.sources[:-3]:
            job.remote.fill(source)
        job.read(job.sources[-1], 0, 10)
        job.remote.find("o00")
    return root


def in_order(root: Path, limit: int) -> None:
    """The catalogue matches the files, and they don't exceed the limit."""
    folder = CacheFolder(str(root), max_bytes=limit)
    files = [*(root / "blobs").iterdir(), *(root / "unverified").iterdir()]
    taken = sum(path.stat().st_blocks * 512 for path in files)
    ready = sum(folder.catalogue.sizes("ready").values())
    rows = sum(row.disk_bytes for row in folder.catalogue.blobs())
    assert (ready, rows) == (taken, folder.catalogue.used_bytes)
    assert folder.catalogue.used_bytes <= limit
    folder.close()


# -- one by one, without a live job


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("else")


def _gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_empty, _cut, _noise, _folder, _gone])
@pytest.mark.parametrize(
    "name", [*NOTES, "catalogue.lock", "keys.lock", "readers.lock", "jobs.lock"]
)
def test_notes_that_are_damaged_are_rebuilt(
    filled: Path, name: str, damage: Callable[[Path], None]
) -> None:
    before = sum(1 for _ in (filled / "blobs").iterdir())
    damage(filled / name)
    with playing(filled) as job:
        job.cache.open()
        held = sum(job.remote.is_whole(s) for s in job.sources)
        # If the boot of a blob is unknown, the blob is checked first.
        assert held == before or (name == "boot" and damage is not _gone)
        job.epoch(random.Random(1))
        fetched = job.store.bytes_read
    unchecked = name == "catalogue.db" or (name == "boot" and damage is not _gone)
    assert unchecked or fetched <= 4 * BLOB_BYTES
    in_order(filled, 8 * MIB)
    with playing(filled, most=0) as job:
        job.epoch(random.Random(2))


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("name", ["format.json", "boot"])
def test_no_flip_of_a_note_ends_a_job(filled: Path, name: str, bit: int) -> None:
    whole = (filled / name).read_bytes()
    for at in range(0, len(whole), 3 if bit else 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        (filled / name).write_bytes(damaged)
        layout = FolderLayout(str(filled))
        layout.check_format()
        assert layout.boot == (boot_id() if name != "boot" else layout.boot)
        assert name != "boot" or layout.boot != boot_id()
    with playing(filled) as job:
        job.epoch(random.Random(1), whole=0)


@given(version=st.integers(2, 10**6), flipped=st.integers(0, 10**6))
def test_a_newer_version_is_known_by_its_checksum(
    tmp_path_factory: pytest.TempPathFactory, version: int, flipped: int
) -> None:
    root = tmp_path_factory.mktemp("newer")
    text = format_text(version)
    (root / "format.json").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"format {version}, wanted 1"):
        DiskCache(root, max_bytes="2MB").open()
    damaged = bytearray(text)
    damaged[flipped // 8 % len(text)] ^= 1 << flipped % 8
    (root / "format.json").write_bytes(damaged)
    (root / "blobs").mkdir()
    (root / "fills").mkdir()
    (root / "trash").mkdir()
    (root / "unverified").mkdir()
    FolderLayout(str(root)).check_format()
    with pytest.raises(ConfigError, match="isn't a cache"):
        admin.stat(root / "blobs")


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (
            "UPDATE facts SET value = ? WHERE name = 'used'",
            ["12;4", "0", "", "-7", b"\xff\xfe", None],
        ),
        ("UPDATE facts SET value = ? WHERE name = 'max_bytes'", ["12;4", "99999999999", None]),
        ("UPDATE names SET size = ?", ["abc", None, 2**62, b"\xff"]),
        ("UPDATE names SET version = ?", [5, b"\xff", None]),
        ("UPDATE blobs SET disk = ?", ["x", 0, -(2**60), 2**62, None]),
        ("UPDATE blobs SET size = ?", ["x", -1, None]),
        ("UPDATE blobs SET state = ?", ["gone", 7, b"\xff"]),
        ("UPDATE blobs SET used = ?", ["x", -1e300, None, b"\xff"]),
        ("UPDATE blobs SET crcs = ?", ["x", b"", 12]),
        ("UPDATE blobs SET kept = ?", ["x", 99]),
        ("UPDATE blobs SET uri = ?, key = 'z/../' || key", [5]),
        ("UPDATE blobs SET grp = ?", [5, None]),
        ("INSERT INTO members VALUES (?, 'g', 'x', 'y', 'z', 5, 'pid', 0)", [77]),
        ("INSERT INTO members VALUES (99, ?, ?1, 1, 1, ?1, 1, 0)", [b"\xff"]),
        ("INSERT INTO labels VALUES ('g', ?)", [b"\xff"]),
        ("DROP TABLE facts -- ?", [1]),
        ("ALTER TABLE blobs RENAME TO heaps -- ?", [1]),
        ("PRAGMA user_version = 77 -- ?", [1]),
    ],
)
def test_books_with_other_values_are_damage(
    filled: Path, tmp_path: Path, change: str, values: list[Any]
) -> None:
    for number, value in enumerate(values):
        root = Path(shutil.copytree(filled, tmp_path / f"copy{number}"))
        with (
            sqlite3.connect(root / "catalogue.db") as books,
            contextlib.suppress(sqlite3.IntegrityError),
        ):
            books.execute(change, () if "-- ?" in change else (value,))
        books.close()
        with playing(root) as job:
            job.epoch(random.Random(number))
            assert job.store.bytes_read <= 5 * BLOB_BYTES
            admin.stat(root)
            admin.list_blobs(root)
        in_order(root, 8 * MIB)


def test_a_wrong_count_lets_no_cache_grow(filled: Path) -> None:
    limit = 2 * MIB
    for change in (
        "UPDATE facts SET value = '0' WHERE name = 'used'",
        "UPDATE blobs SET disk = 0",
        "DELETE FROM facts",
        "DELETE FROM blobs WHERE key > '8'",
    ):
        with sqlite3.connect(filled / "catalogue.db") as books:
            books.execute(change)
        books.close()
        with playing(filled, max_bytes=limit, group="h") as job:
            for source in job.sources:
                job.remote.fill(source)
            total = sum(p.lstat().st_blocks * 512 for p in filled.rglob("*"))
            assert total <= limit
        in_order(filled, limit)


def test_a_live_job_continues_with_books_that_were_rebuilt(filled: Path) -> None:
    """By itself, and by another that finds them damaged first."""
    with playing(filled) as job, playing(filled, most=2) as other:  # one each
        for one in (job, other):
            one.epoch(random.Random(1), whole=0)
        for damaged_by in (job, other):
            with sqlite3.connect(filled / "catalogue.db") as books:
                books.execute("UPDATE facts SET value = 'x' WHERE name = 'used'")
                books.execute("UPDATE blobs SET disk = 5")
            books.close()
            for one in (damaged_by, job, other):
                one.remote.drop(one.sources[3])
                one.blobs.clear()
                one.epoch(random.Random(2))
                assert one.cache.can_be_used
        summary = admin.stat(filled)
        assert len(summary.jobs) == 2
        assert summary.max_bytes == 8 * MIB
    in_order(filled, 8 * MIB)


# -- the catalogue's file, with any contents


def _foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as books:
        books.execute("CREATE TABLE recipes (name TEXT, stars INTEGER)")
        books.execute("INSERT INTO recipes VALUES ('soup', 5)")
    books.close()


def _no_text(path: Path) -> None:
    """A schema that SQLite quotes in its message, and that isn't UTF-8."""
    data = path.read_bytes()
    at = data.index(b"CREATE TABLE blobs") + 7
    path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as books:
        books.execute("PRAGMA user_version = 77")
    books.close()


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _cut_page(path: Path) -> None:
    os.truncate(path, 4096 + 77)


CATALOGUES = [_noise, _cut, _cut_page, _empty, _gone, _folder, _link, _pipe, _foreign, _no_text,
              _newer]  # fmt: skip


def _flat(root: Path) -> None:
    """Put the log into the books, so that damage to these matters."""
    with contextlib.closing(sqlite3.connect(root / "catalogue.db")) as books:
        books.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *(("stat", damage) for damage in CATALOGUES),
        *((name, _no_text) for name in ("ls", "verify", "evict", "clear", "gc", "doctor")),
        *(("doctor", damage) for damage in (_empty, _gone, _folder)),
    ],
)
def test_every_command_rebuilds_a_catalogue_with_one_warning(
    filled: Path, command: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    _flat(filled)
    damage(filled / "catalogue.db")
    more = {"evict": ["--to", "600KB"], "clear": ["--yes"]}.get(command, [])
    before = [command] if command == "doctor" else ["cache", command]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*before, str(filled), *more]) == 0
    both = capsys.readouterr()
    report = " ".join(both.err.split())
    assert report.count("warning") == 1, report
    assert "catalogue.db" in report
    assert "rebuilt from 21 blobs" in report
    assert "Traceback" not in both.out + report
    assert main(["cache", "stat", str(filled)]) == 0
    assert "warning" not in capsys.readouterr().err
    in_order(filled, 8 * MIB)


@pytest.mark.parametrize("damage", CATALOGUES)
def test_a_live_job_rebuilds_a_catalogue_with_one_warning(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    """The catalogue's file is replaced or changed; blobs that readers use stay valid."""
    with playing(filled, most=2) as job, playing(filled, most=2) as other:
        for one in (job, other):
            one.epoch(random.Random(1), whole=0)
        _flat(filled)
        damage(filled / "catalogue.db")
        held = dict(job.blobs)
        with warnings.catch_warnings(record=True) as report:
            warnings.simplefilter("always")
            for one in (job, other, job):
                one.remote.drop(one.sources[3])
                one.blobs.pop(one.sources[3].key, None)
                one.epoch(random.Random(2))
                assert one.cache.can_be_used
        texts = [str(each.message) for each in report]
        assert len(texts) <= 1, texts  # SQLite may have had all that was damaged in memory
        assert damage in (_cut, _cut_page, _noise, _no_text, _newer, _empty) or texts
        assert not any("can't be used" in text for text in texts)
        for source in job.sources[:20]:
            if source.key in held:
                assert bytes(held[source.key].data) == job.store.objects[source.uri]
        assert job.store.bytes_read + other.store.bytes_read <= 14 * BLOB_BYTES
    in_order(filled, 8 * MIB)


@pytest.mark.parametrize("damage", [_foreign, _folder, _link])
def test_files_of_others_are_moved_and_never_removed(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    _flat(filled)
    damage(filled / "catalogue.db")
    with pytest.warns(PenstockWarning, match=r"the old file is now moved-\d+-catalogue.db"):
        admin.stat(filled)
    (moved,) = filled.glob("moved-*-catalogue.db")
    if damage is _foreign:
        with contextlib.closing(sqlite3.connect(moved)) as books:
            assert books.execute("SELECT * FROM recipes").fetchall() == [("soup", 5)]
    elif damage is _folder:
        assert (moved / "something").read_text() == "else"
    else:
        assert (filled / "elsewhere").stat().st_size > 4096


@pytest.mark.filterwarnings("ignore:.*catalogue.db")
@pytest.mark.parametrize("damage", [_noise, _cut, _gone, _no_text])
def test_a_rebuilt_catalogue_has_the_limit_and_the_pins_of_before(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    """A command that doesn't know the limit rebuilds it, alone and during a job."""
    with playing(filled, most=1) as job:
        job.epoch(random.Random(1), whole=1)
        before = admin.stat(filled)
        _flat(filled)
        damage(filled / "catalogue.db")
        assert admin.stat(filled).max_bytes == 8 * MIB
        job.remote.drop(job.sources[3])
        job.blobs.clear()
        job.epoch(random.Random(2), whole=1)
        after = admin.stat(filled)
        assert set(after.labels) - {""} == {"x"}
        assert after.pinned_bytes >= before.pinned_bytes - 8192  # a small object isn't claimed
        with playing(filled, most=0) as other:
            other.epoch(random.Random(3))
    _flat(filled)
    damage(filled / "catalogue.db")
    assert admin.stat(filled).max_bytes == 8 * MIB
    in_order(filled, 8 * MIB)


@pytest.mark.filterwarnings("ignore:.*catalogue.db")
def test_rows_that_a_damaged_catalogue_still_gives_keep_their_checksums(filled: Path) -> None:
    def rows() -> dict[str, tuple[str, str, bytes | None]]:
        folder = CacheFolder(str(filled), max_bytes=8 * MIB)
        found = {one.key: (one.group, one.uri, one.crcs) for one in folder.catalogue.blobs()}
        folder.close()
        return found

    whole = rows()
    with sqlite3.connect(filled / "catalogue.db") as books:
        books.execute("UPDATE facts SET value = 'x'")
    books.close()
    assert rows() == whole
    with sqlite3.connect(filled / "catalogue.db") as books:  # the row is there, and isn't right
        books.execute("UPDATE blobs SET size = 7 WHERE key = ?", (min(whole),))
        books.execute("UPDATE facts SET value = 'x'")
    books.close()
    assert rows() == whole | {min(whole): ("", "", None)}


@pytest.mark.parametrize("bit", [7, 2])
def test_no_flip_of_the_first_page_ends_a_command(filled: Path, tmp_path: Path, bit: int) -> None:
    """A sample of the positions; the schema's text and all of the header are tried most."""
    _flat(filled)
    whole = (filled / "catalogue.db").read_bytes()
    start = whole.index(b"CREATE TABLE") - 100
    for number, at in enumerate([*range(0, 108, 9), *range(start, 4096, 79)]):
        root = Path(shutil.copytree(filled, tmp_path / "copy"))
        (root / "catalogue.db").write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        )
        with warnings.catch_warnings(record=True) as report:
            warnings.simplefilter("always")
            assert admin.stat(root).blobs == 21
            assert len(admin.list_blobs(root)) == 22
            if number % 4 == 0:
                assert admin.verify(root).checked == 21
        assert len(report) <= 1, [str(one.message) for one in report]
        in_order(root, 8 * MIB)
        shutil.rmtree(root)


def test_processes_that_find_the_damage_at_once_rebuild_once(filled: Path) -> None:
    _flat(filled)
    _noise(filled / "catalogue.db")
    with warnings.catch_warnings(record=True) as report, ThreadPoolExecutor(6) as pool:
        warnings.simplefilter("always")
        found = list(pool.map(lambda _: admin.stat(filled), range(12)))
    assert [one.blobs for one in found] == [21] * 12
    assert 1 <= len(report) <= 2, [str(one.message) for one in report]
    in_order(filled, 8 * MIB)


# -- flips of anything


def _flip(root: Path, rng: random.Random, kinds: tuple[str, ...]) -> str:
    """Turn a bit over in a file of the folder: any kind of file as likely as another."""
    kind = rng.choice(kinds)
    files = [p for p in root.rglob(kind) if p.is_file() and p.stat().st_size]
    if not files:
        return ""
    path = rng.choice(sorted(files))
    with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        at = rng.randrange(max(1, path.stat().st_size))
        file.seek(at)
        byte = file.read(1)
        if byte:
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    return str(path.relative_to(root))


KINDS = ("format.json", "boot", "limit", "catalogue.db", "catalogue.db-wal", "catalogue.db-shm",
         "*.part", "*.map", "blobs/*", "trash/*", "unverified/*")  # fmt: skip


def _idle_flips(root: Path, flips: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(flips):
        _flip(root, rng, KINDS)
        with playing(root) as job:
            job.epoch(rng, whole=0.3)
            if number % 5 == 0:
                job.remote.drop(rng.choice(job.sources))
    in_order(root, 8 * MIB)


def _live_flips(root: Path, flips: int, seed: int) -> None:
    rng = random.Random(seed)
    with playing(root, most=2) as job, playing(root, most=2) as other:
        for number in range(flips):
            _flip(root, rng, KINDS)
            for one in (job, other):
                for source in rng.sample(one.sources, 3):
                    one.blobs.pop(source.key, None)
                one.epoch(rng, whole=0.2)
            if number % 7 == 0:
                job.remote.drop(rng.choice(job.sources))
    with playing(root) as job:
        job.epoch(rng)
    in_order(root, 8 * MIB)


def test_flips_in_an_idle_cache(filled: Path) -> None:
    _idle_flips(filled, 12, seed=1)


def test_flips_under_live_jobs(filled: Path) -> None:
    _live_flips(filled, 12, seed=1)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("play", [_idle_flips, _live_flips])
def test_300_flips(filled: Path, play: Callable[[Path, int, int], None], seed: int) -> None:
    play(filled, 60, seed)


# -- a disk that fails at any of its calls


CALLS = ("pwrite", "write", "rename", "replace", "unlink", "posix_fallocate", "preadv", "fstat",
         "stat", "listdir", "scandir", "readlink", "open", "statvfs", "mkdir")  # fmt: skip


def _fails_once(root: Path, at: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The at-th call that touches the disk fails."""
    seen = 0
    with monkeypatch.context() as patched:
        for name in CALLS:
            plain = getattr(os, name)

            def watched(*args: Any, _plain: Any = plain, **named: Any) -> Any:
                nonlocal seen
                if on_the_watchdogs_thread():
                    return _plain(*args, **named)
                seen += 1
                if seen == at:
                    raise OSError(code, os.strerror(code))
                return _plain(*args, **named)

            patched.setattr(os, name, watched)
        patched.setattr("penstock.cache.disk.disk_cache.RETRY_S", 0.0)
        with playing(root, most=2) as job:
            job.epoch(random.Random(at), whole=0.3)
            job.remote.drop(job.sources[0])


def test_calls_of_the_disk_that_fail(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for number in range(20):
        code = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS)[number % 4]
        _fails_once(filled, rng.randrange(1, 400), code, monkeypatch)
    with playing(filled, most=0) as job:
        job.epoch(rng)
    in_order(filled, 8 * MIB)


@pytest.mark.grid
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_60_calls_of_the_disk_that_fail(
    filled: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for number in range(60):
        _fails_once(filled, 1 + 11 * number, code, monkeypatch)
    with playing(filled, most=0) as job:
        job.epoch(random.Random(3))
    in_order(filled, 8 * MIB)


# -- other data in a cache folder


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_an_index_in_the_cache_is_rebuilt_from_right_bytes(tmp_path: Path, kind: str) -> None:
    """Its parts, its manifest and the copy of the data that it is made of are damaged."""
    make = images.class_folder if kind == "folder" else tars.tar_folder
    make(tmp_path / "set", samples=40)
    rng, root = random.Random(5), tmp_path / "cache"

    def everything() -> list[Any]:
        cache = DiskCache(root, max_bytes=32 * MIB)
        files = fsspec.filesystem("file", skip_instance_cache=True)
        with Dataset(tmp_path / "set", cache=cache, filesystem=files) as dataset:
            dataset.open(verify=images.verify)
            sizes = enumerate(dataset.index.sizes.tolist())
            rows = np.array([(shard, row) for shard, count in sizes for row in range(count)])
            found = dataset.read(rows)
        cache.close()
        return list(
            zip(
                map(bytes, found.columns["image"].samples),
                found.columns["label"].values.tolist(),
                strict=True,
            )
        )

    wanted = everything()
    assert len(wanted) > 35
    for name in ("*.arrow", "manifest.arrow", "sidecars/*"):
        for path in (root / "indexes").rglob(name):
            if path.is_file():
                _turn(path, rng)
        for path in (root / "blobs").iterdir():
            _turn(path, rng)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PenstockWarning)
            assert everything() == wanted
        assert all("can't be used. It is fetched or rebuilt" in str(w.message) for w in caught)


def _turn(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
