"""Test maps of files, and locks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.cache import StalledError
from penstock.cache.base import ByteLocks, FileMap, ReaderLocks, map_file, wait_for
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_what_looks_into_a_map_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"penstock")
    calls: list[str] = []
    with (tmp_path / "file").open("rb") as file:
        mapped = FileMap(file.fileno(), on_unmap=lambda: calls.append("gone"))
    buffer = mapped.buffer()
    del mapped
    assert bytes(memoryview(buffer)) == b"penstock"
    assert calls == []
    del buffer
    assert calls == ["gone"]
    assert bytes(memoryview(map_file(str(tmp_path / "file")).buffer())) == b"penstock"


@pytest.mark.parametrize("keeper", ["threading", "os", "abc", "__main__"])
def test_a_cached_blob_that_lives_to_the_exit_prints_nothing(tmp_path: Path, keeper: str) -> None:
    """The blob may be kept by any module of Python, and outlive modules of ours."""
    program = """
        import importlib, sys
        from penstock.cache.base import BlobSource, Segment
        from penstock.cache.disk import CacheFolder

        folder = CacheFolder(sys.argv[1], max_bytes=2**24)
        segment = Segment(path="x", size_bytes=5, version=None)
        source = BlobSource(key="ab" * 20, uri="mem://x", segments=(segment,), size_bytes=5)
        assert folder.put(source, memoryview(b"hello"), group="g", kept=False)
        other = BlobSource(key="cd" * 20, uri="mem://y", segments=(segment,), size_bytes=5)
        begun = folder.begin(other, group="g", pinned=True)
        kept = [folder, folder.find(source.key, 5), begun]
        importlib.import_module(sys.argv[2]).penstock_kept = kept
        del folder, kept, begun
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "c"), keeper],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def opened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def test_two_opens_exclude_each_other_where_ranges_meet(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    one, two = ByteLocks(opened(path)), ByteLocks(opened(path))
    assert one.lock(10, 5)
    assert not two.lock(14)
    assert two.lock(15, 10)
    assert two.is_held(10)
    assert not two.is_held(9)
    one.unlock(12, 3)
    assert two.lock(12)
    one.close()
    assert two.lock(10, 2)
    two.close()
    two.close()


def test_readers_share_and_keep_an_evictor_out(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    readers, others, evictor = (
        ReaderLocks(opened(path)),
        ReaderLocks(opened(path)),
        ByteLocks(opened(path)),
    )
    inode = 2**40 + 7
    assert readers.acquire(inode)
    assert readers.acquire(inode)
    assert others.acquire(inode)
    readers.release(inode)
    others.release(inode)
    assert not evictor.lock(inode)
    readers.release(inode)
    assert evictor.lock(inode)
    assert not readers.acquire(inode)
    evictor.unlock(inode)
    readers.release(inode)  # once too often is nothing
    assert readers.acquire(inode)
    for locks in (readers, others):
        locks.close()
    evictor.close()


def test_a_killed_holder_lets_go_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    mine = ByteLocks(opened(path))
    code = textwrap.dedent(
        f"""
        import os, sys
        from penstock.cache.base.locks import ByteLocks
        locks = ByteLocks(os.open({path!r}, os.O_RDWR))
        assert locks.lock(3)
        print("held", flush=True)
        sys.stdin.read()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert not mine.lock(3)
        child.kill()
        child.wait(PATIENCE_S)
        assert mine.lock(3)
        mine.close()


def test_a_wait_ends_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(StalledError, match="the blob: another process"):
        wait_for(lambda: False, timeout_s=0.02, what="the blob")
    stop = threading.Event()
    stop.set()
    with pytest.raises(StalledError):
        wait_for(lambda: False, timeout_s=60, what="the blob", stop=stop)
    path = str(tmp_path / "x")
    locks, others = ByteLocks(opened(path)), ByteLocks(opened(path))
    with locks.holding(1, timeout_s=1, what="one"):
        assert not others.lock(1)
    assert others.lock(1)
    locks.close()
    others.close()


def test_a_forked_child_lets_nothing_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "locks")
    readers, evictor = ReaderLocks(opened(path)), ByteLocks(opened(path))
    assert readers.acquire(5)
    child = os.getpid() + 1
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: child)
        readers.release(5)
    assert not evictor.lock(5)
    readers.close()
    evictor.close()
