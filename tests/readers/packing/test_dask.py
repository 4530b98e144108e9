"""Pack on a Dask cluster of worker processes: some are killed, some don't see the data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import DatasetNotFoundError, DestinationError
from penstock.readers import pack
from tests import executors, images
from tests.files import files_below
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

distributed = pytest.importorskip("distributed")

ROOT = Path(__file__).resolve().parents[3]
SMALL = 4000  # bytes a shard: a handful of test images


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """A client of a local cluster of worker processes, which are restarted when they die."""
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as here,
        distributed.Client(here) as client,
    ):
        yield client


def pack_with_kills(tmp_path: Path, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack on three workers, kill one of them twice, and compare with the pack of one process."""
    folder = images.class_folder(tmp_path / "set", samples=samples)
    images.write_folder(folder, {"class-1/bad.jpg": images.BAD["truncated.jpg"][0]})
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    executors.plan_kills(tmp_path / "kills", 2, monkeypatch.setenv)
    with cluster(3) as client:
        summary = pack(
            folder,
            tmp_path / "pack",
            shard_bytes=SMALL,
            verify=executors.verify,
            executor=client.get_executor(),
        )
    assert not list((tmp_path / "kills").iterdir())
    assert (summary.samples, summary.quarantined) == (samples, 1)
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


def test_a_worker_that_is_killed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_with_kills(tmp_path, 150, monkeypatch)


@pytest.mark.grid
def test_two_thousand_images_and_a_worker_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_with_kills(tmp_path, 2000, monkeypatch)


DRIVER = """
import os, signal, sys
import distributed
from penstock.readers import pack

def progress(done, total, done_bytes):
    if done > total // 3:
        os.kill(os.getpid(), signal.SIGKILL)

with distributed.Client(sys.argv[1]) as client:
    pack(sys.argv[2], sys.argv[3], shard_bytes=4000, verify="tests.images:verify",
         executor=client.get_executor(), progress=progress)
"""


def test_a_driver_that_is_killed_and_one_that_resumes(tmp_path: Path) -> None:
    folder = images.class_folder(tmp_path / "set", samples=60)
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    with cluster(2) as client:
        address = client.scheduler_info()["address"]
        command = [sys.executable, "-c", DRIVER, address, str(folder), str(tmp_path / "pack")]
        killed = subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert list((tmp_path / "pack").glob("*.arrow"))
        pack(
            folder,
            tmp_path / "pack",
            shard_bytes=SMALL,
            verify=images.verify,
            executor=client.get_executor(),
        )
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


def can_hide() -> bool:
    """Return True if this machine lets a process have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


@contextmanager
def blind_worker(address: str, hidden: Path) -> Iterator[None]:
    """A worker that sees an empty folder in place of the parent of `hidden`."""
    worker = f"{sys.executable} -m distributed.cli.dask_worker {address} --no-nanny --nthreads 1"
    hide = f"mount -t tmpfs none {hidden.parent} && cd {ROOT} && exec {worker} --no-dashboard"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", hide],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize("hidden", ["source", "destination"])
@pytest.mark.skipif(not can_hide(), reason="needs mount namespaces")
def test_a_worker_without_the_data_mounted(tmp_path: Path, hidden: str) -> None:
    folder = images.class_folder(tmp_path / "source" / "set", samples=30)
    (tmp_path / "destination").mkdir()
    away = tmp_path / hidden / "set"
    error = DatasetNotFoundError if hidden == "source" else DestinationError
    with cluster(1) as client, blind_worker(client.scheduler_info()["address"], away):
        client.wait_for_workers(2, timeout=PATIENCE_S)
        with pytest.raises(
            error, match=rf"Worker \S+ \(process \d+\): \S*/{hidden}/.*doesn't exist"
        ):
            pack(
                folder,
                tmp_path / "destination" / "pack",
                shard_bytes=SMALL,
                verify=images.verify,
                executor=client.get_executor(),
            )
    assert not (tmp_path / "destination" / "pack" / "_penstock" / "manifest.arrow").exists()
