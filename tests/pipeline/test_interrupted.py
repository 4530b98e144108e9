"""Ctrl-C while a server hangs ends the process at once, in every phase of a job.

Every timeout of the job is ten minutes, and the guard of a test five: a process that waits for a
request's own end doesn't pass.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from tests.conftest import write_photographs
from tests.servers.scripted import Asked, ScriptedServer, Talk, scripted
from tests.warm import Warm
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GUARD_S = 300.0
JOB = """
import sys, warnings
warnings.simplefilter("ignore")
from penstock.cache import DiskCache
from penstock.readers import Dataset

if __name__ == "__main__":
    phase, url, place, endpoint = sys.argv[1:]
    options = {"connect_timeout": 600, "read_timeout": 600, "retry_timeout": 600}
    if url.startswith("s3"):
        options |= {"key": "k" * 20, "secret": "s" * 40, "endpoint_url": endpoint}
    cache = DiskCache(place, max_bytes="1GiB")
    if phase == "warm":
        from penstock.pipeline.feed import warm
        warm(Dataset(url, cache=cache, storage_options=options))
    dataset = Dataset(url, cache=cache, storage_options=options)
    len(dataset)
    from penstock.augment import imagenet_eval
    from penstock.pipeline import DataLoader
    loader = DataLoader(dataset, batch_size=4, seed=1, shuffle=True, drop_last=True,
                        augment=imagenet_eval(32, resize=36))
    try:
        for batch in loader:
            pass
    except (KeyboardInterrupt, RuntimeError):  # of Condition.wait at its very beginning
        if phase != "close":
            raise
        loader.close()
        dataset.close()
        print("closed", flush=True)
        sys.exit(0)
    print("done", flush=True)
"""


def hangs(phase: str, asked: Asked, count: int) -> bool:
    """Return True if the server holds this request back. count: ranges of shards so far."""
    is_range = "range" in asked.headers
    is_manifest = "manifest" in asked.path
    if phase == "listing":
        return asked.path.endswith("/") or "list-type" in asked.target
    if phase == "size":
        return asked.method == "HEAD"
    if phase == "manifest":
        return is_manifest and asked.method == "GET"
    if phase == "index":
        return asked.path.endswith(".jpg") and asked.method == "GET"
    if phase == "mid-epoch":
        return is_range and not is_manifest and count > 12
    return is_range and not is_manifest


class Files:
    """Serves a folder; lets requests of a phase wait. hung: one does."""

    def __init__(self, folder: Path, phase: str, *, drips: bool) -> None:
        self._folder, self._phase, self._drips = folder, phase, drips
        self._count = 0
        self._lock = threading.Lock()
        self.hung = threading.Event()

    def __call__(self, talk: Talk, asked: Asked) -> None:
        with self._lock:
            self._count += "range" in asked.headers and "manifest" not in asked.path
            count = self._count
        if hangs(self._phase, asked, count):
            if self._drips and asked.method == "GET":
                size = os.path.getsize(self._folder / unquote(asked.path).strip("/"))
                start, end = asked.span() or (0, size)
                report = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
                status = 206 if asked.span() else 200
                talk.head(status, {"Content-Length": str(end - start), "ETag": '"v1"', **report})
            self.hung.set()
            while not talk.closing.wait(0.05):
                if self._drips and not talk.write(b"."):
                    return
            return
        local = self._folder / unquote(asked.path).strip("/")
        if "list-type" in asked.target:
            talk.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif local.is_dir():
            names = [f"{each.name}/" if each.is_dir() else each.name for each in local.iterdir()]
            talk.answer(200, "".join(f'<a href="{name}">x</a>' for name in names).encode())
        elif local.is_file():
            talk.serve(local.read_bytes(), asked)
        else:
            talk.answer(404)


def job(phase: str, url: str, place: Path, server: ScriptedServer) -> Warm:
    program = place / "job.py"
    program.write_text(JOB)
    return Warm([program, phase, url, place / "cache", server.url])


def end(process: Warm, act: Callable[[], object]) -> tuple[str, str]:
    """Return the output of the process after act()."""
    try:
        act()
        return process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("phase", "scheme", "drips"),
    [
        ("listing", "http", True),
        ("listing", "s3", False),
        ("size", "s3", False),
        ("manifest", "http", True),
        ("index", "http", False),
        ("warm", "http", False),
        ("first batch", "http", True),
        ("mid-epoch", "s3", False),
    ],
)
def test_ctrl_c_ends_a_job_while_requests_hang(
    phase: str, scheme: str, drips: bool, pack: Path, tmp_path: Path
) -> None:
    folder = pack.parent
    name = pack.name
    if phase in ("listing", "index"):
        folder = tmp_path / "served"
        name = "photos"
        write_photographs(folder / name, samples=24, classes=2)
    files = Files(folder, phase, drips=drips)
    with scripted(files) as server:
        url = f"{server.url}/{name}" if scheme == "http" else f"s3://{name}"
        process = job(phase, url, tmp_path, server)
        if not files.hung.wait(GUARD_S):
            process.kill()
            raise AssertionError(process.communicate())
        out, err = end(process, lambda: process.send_signal(signal.SIGINT))
    assert process.returncode != 0
    # Python's Condition.wait turns a Ctrl-C at its very beginning into a RuntimeError.
    assert "KeyboardInterrupt" in err
    assert "done" not in out


def test_close_ends_while_requests_hang(pack: Path, tmp_path: Path) -> None:
    files = Files(pack.parent, "close", drips=True)
    with scripted(files) as server:
        process = job("close", f"{server.url}/{pack.name}", tmp_path, server)
        assert files.hung.wait(GUARD_S)
        out, err = end(process, lambda: process.send_signal(signal.SIGINT))
    assert (process.returncode, out) == (0, "closed\n"), err


ENDS = """
import gc, sys
from penstock.cache.threads import end_interrupted

class Cycle:
    def __del__(self):
        print("searched", flush=True)

gc.disable()
kept = Cycle()
kept.own = kept
del kept
END
"""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise ValueError", "searched\n"),
        ("raise KeyboardInterrupt", ""),
        ("end_interrupted(); sys.exit(130)", ""),
    ],
)
def test_an_interrupted_process_ends_without_the_last_search_for_cycles(
    last: str, said: str
) -> None:
    """Among the objects of torch and DALI that search takes seconds."""
    program = [sys.executable, "-c", ENDS.replace("END", last)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == said


LOCAL = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from penstock.augment import imagenet_eval
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from penstock.readers.byte_source import LocalFile

def hang(*_):
    os.write(1, b"hung\\n")  # in one call, as several threads come here
    threading.Event().wait()

if __name__ == "__main__":
    dataset = Dataset(sys.argv[1], index=sys.argv[2])
    len(dataset)
    LocalFile.open = hang
    loader = DataLoader(dataset, batch_size=4, seed=1, shuffle=True, drop_last=True, timeout=6000,
                        augment=imagenet_eval(32, resize=36))
    if sys.argv[3] == "with":
        with loader:
            next(iter(loader))
    next(iter(loader))
"""


@pytest.mark.parametrize("way", ["with", "without"])
def test_ctrl_c_ends_a_job_while_a_local_disk_hangs(way: str, tmp_path: Path) -> None:
    photographs = write_photographs(tmp_path / "photos", samples=24, classes=2)
    process = Warm(["-c", LOCAL, photographs, tmp_path / "index", way])
    if process.stdout.readline() != "hung\n":
        process.kill()
        raise AssertionError(process.communicate())
    _, err = end(process, lambda: process.send_signal(signal.SIGINT))
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
