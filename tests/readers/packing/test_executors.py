"""Test packs by executors: the bytes are those of one process, even if workers or a driver die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import (
    ConfigError,
    DatasetNotFoundError,
    DestinationError,
    IndexChangedError,
    MissingDependencyError,
    RayExecutor,
    WorkerError,
)
from penstock.readers import Dataset, SerializedSource, concat, pack
from penstock.readers.packing import shard_writing, write_task
from tests import executors, images
from tests.files import files_below
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from concurrent.futures import Executor


SMALL = 4000  # bytes a shard: a handful of test images


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images.flawed_folder(tmp_path / "set", 40)


def make(src: Any, dst: Path, **options: Any) -> Any:
    return pack(src, dst, **({"shard_bytes": SMALL, "verify": executors.verify} | options))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_folder_over_processes_and_threads(
    folder: Path, tmp_path: Path, processes: Executor, shuffle: bool
) -> None:
    report: list[tuple[int, int, int]] = []
    alone = make(folder, tmp_path / "alone", shuffle=shuffle)
    here = make(
        folder,
        tmp_path / "here",
        shuffle=shuffle,
        executor=processes,
        progress=lambda *each: report.append(each),
    )
    with ThreadPoolExecutor(3) as threads:
        make(folder, tmp_path / "threads", shuffle=shuffle, executor=threads)
    assert files_below(tmp_path / "here") == files_below(tmp_path / "alone")
    assert files_below(tmp_path / "threads") == files_below(tmp_path / "alone")
    assert (here.samples, here.shards, here.quarantined) == (40, alone.shards, 3)
    assert here.complete
    assert len(report) == alone.shards
    assert report[-1][:2] == (42, 42)


def test_packs_and_parts_of_datasets(folder: Path, tmp_path: Path, processes: Executor) -> None:
    make(folder, tmp_path / "pack")
    packed, whole = Dataset(tmp_path / "pack"), Dataset(folder)
    whole.open(verify=images.verify)
    sources = {
        "url": str(tmp_path / "pack"),
        "pack": packed,
        "part": whole.subset(range(5, 31)),
        "both": concat([whole.subset([1, 2, 3]), whole]),
    }
    for name, source in sources.items():
        alone, here = tmp_path / f"{name}-alone", tmp_path / f"{name}-here"
        make(source, alone, shard_bytes=9000)
        make(source, here, shard_bytes=9000, executor=processes)
        assert files_below(here) == files_below(alone), name


def test_rewritten_images(folder: Path, tmp_path: Path, processes: Executor) -> None:
    make(folder, tmp_path / "alone", short_side=12, quality=80)
    make(folder, tmp_path / "pack", short_side=12, quality=80, executor=processes)
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


def test_a_worker_of_a_pool_that_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, tmp_path / "alone")
    executors.plan_kills(tmp_path / "kills", 1, monkeypatch.setenv)
    with (
        ProcessPoolExecutor(2) as pool,
        pytest.raises(WorkerError, match=r"worker died.*of \d+ shards.*repeat the call.*continue"),
    ):
        make(folder, tmp_path / "pack", executor=pool)
    assert not (tmp_path / "pack" / "_penstock" / "manifest.arrow").exists()
    with ProcessPoolExecutor(2) as pool:
        make(folder, tmp_path / "pack", executor=pool)
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


DRIVER = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from penstock.readers import pack

def progress(done, total, done_bytes):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

with ThreadPoolExecutor(2) as pool:
    pack(sys.argv[1], sys.argv[2], shard_bytes=4000, verify="tests.images:verify", executor=pool,
         progress=progress)
"""


def test_a_killed_driver_resumes(folder: Path, tmp_path: Path) -> None:
    make(folder, tmp_path / "alone")
    command = [sys.executable, "-c", DRIVER, str(folder), str(tmp_path / "pack")]
    killed = subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = set((tmp_path / "pack" / "_penstock" / "parts").iterdir())
    assert done
    watched = executors.RecordingExecutor()
    summary = make(folder, tmp_path / "pack", executor=watched)
    assert len(watched.tasks) <= summary.shards - len(done) + 1
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


def test_a_task_that_runs_twice_and_one_that_is_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, tmp_path / "alone")
    tasks = []

    def twice(*task: Any) -> Any:
        tasks.append(task)
        (first, record), (second, same) = write_task(*task), write_task(*task)
        assert record == same
        assert (
            record.facts is None
            or Path(os.fsdecode(first)).read_bytes() == Path(os.fsdecode(second)).read_bytes()
        )
        return second, same

    monkeypatch.setattr(shard_writing, "write_task", twice)
    with ThreadPoolExecutor(1) as pool:
        make(folder, tmp_path / "pack", executor=pool)
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")
    with pytest.raises(DestinationError, match="doesn't exist on this machine"):
        write_task(*tasks[0])
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/set", {"key": "AKIAIOSFODNN7", "secret": "wJalrXUtnFEMI"}),
        ("s3://bucket/set", {"client_kwargs": {"aws_session_token": "FwoGZXIvYXdz"}}),
        ("https://user:wJalrXUtnFEMI@host/set", {}),
        ("https://host/set?X-Amz-Signature=wJalrXUtnFEMI", {}),
    ],
)
def test_credentials_arent_sent(tmp_path: Path, url: str, options: dict[str, Any]) -> None:
    watched = executors.RecordingExecutor()
    for source in (url, Dataset(url, storage_options=options)):
        report = {"storage_options": options} if source is url else {}
        if source is url:
            with pytest.raises(ConfigError, match="login of its own") as caught:
                make(source, tmp_path / "pack", executor=watched, **report)
            assert "wJalr" not in str(caught.value)
            assert "FwoG" not in str(caught.value)
        else:
            with pytest.raises(ConfigError, match="login of its own"):
                SerializedSource.of(source)  # type: ignore[arg-type]
    assert not watched.tasks
    assert not (tmp_path / "pack").exists()


def test_what_is_pickled_is_small_and_plain(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    watched = executors.RecordingExecutor()
    make(folder, tmp_path / "pack", executor=watched, storage_options={"anon": True})
    assert watched.tasks
    for task in watched.tasks:
        assert b"wJalrXUtnFEMI" not in task
        assert b"tests.executors:verify" in task
        assert len(task) < 5000


def test_refusals(folder: Path, tmp_path: Path) -> None:
    watched = executors.RecordingExecutor()
    for wrong, words in (
        ({"executor": 3}, "wanted an Executor"),
        ({"executor": watched, "rank": 1, "size": 2}, "Either ranks"),
        ({"executor": watched, "verify": lambda _: []}, "a function of a module"),
        ({"executor": watched, "filesystem": object()}, "file system object"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(folder, tmp_path / "pack", **wrong)
    with pytest.raises(MissingDependencyError, match="nowhere"):
        make(folder, tmp_path / "pack", executor=watched, verify="tests.nowhere:verify")
    assert not (tmp_path / "pack").exists()


def test_the_error_of_a_worker_names_it_and_what_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = executors.RecordingExecutor()
    real = watched.submit

    def elsewhere(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if folder.exists():
            os.rename(folder, tmp_path / "gone")
        return real(fn, *args, **kwargs)

    monkeypatch.setattr(watched, "submit", elsewhere)
    with pytest.raises(DatasetNotFoundError, match=r"Worker .*process.*set doesn't exist on this"):
        make(folder, tmp_path / "pack", executor=watched)
    assert not list((tmp_path / "pack").glob("*.arrow"))
    os.rename(tmp_path / "gone", folder)

    def other(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        (folder / "class-0" / "0000.jpg").write_bytes(b"another file")
        return real(fn, *args, **kwargs)

    monkeypatch.setattr(watched, "submit", other)
    with pytest.raises(IndexChangedError, match="Worker"):
        make(folder, tmp_path / "other", executor=watched, shard_bytes=10**6)
    assert not list((tmp_path / "other").glob("*.arrow"))


def test_a_worker_of_another_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = executors.RecordingExecutor()
    real = watched.submit

    def older(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr("penstock.cache.executors.__version__", "0.0.1")
        return real(fn, *args, **kwargs)

    monkeypatch.setattr(watched, "submit", older)
    with pytest.raises(ConfigError, match=r"Worker .* has Penstock 0\.0\.1.*same version"):
        make(folder, tmp_path / "pack", executor=watched)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "samples", [100, pytest.param(2000, marks=pytest.mark.grid, id="2000 images")]
)
def test_ray_with_a_worker_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    ray = pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"ray\.init"):
        RayExecutor()
    folder = images.class_folder(tmp_path / "set", samples=samples)
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    executors.plan_kills(tmp_path / "kills", 2, monkeypatch.setenv)
    environment = {
        "env_vars": {executors.KILLS: os.environ[executors.KILLS], "PYTHONPATH": str(ROOT)}
    }
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        with RayExecutor() as executor:
            assert executor.num_workers == 3
            pack(
                folder,
                tmp_path / "pack",
                shard_bytes=SMALL,
                verify=executors.verify,
                executor=executor,
            )
    finally:
        ray.shutdown()
    assert not list((tmp_path / "kills").iterdir())
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")


RAY_DRIVER = """
import sys
from mpi4py.futures import MPIPoolExecutor
from penstock.readers import pack

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        assert executor.num_workers == 2
        pack(sys.argv[1], sys.argv[2], shard_bytes=4000, verify="tests.images:verify",
             executor=executor)
"""


def test_a_pool_of_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py.futures")
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec")
    folder = images.class_folder(tmp_path / "set", samples=60)
    pack(folder, tmp_path / "alone", shard_bytes=SMALL, verify=images.verify)
    (tmp_path / "drive.py").write_text(RAY_DRIVER)
    command = [mpiexec, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    command += ["-m", "mpi4py.futures", str(tmp_path / "drive.py"), str(folder)]
    subprocess.run(
        [*command, str(tmp_path / "pack")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
        check=True,
    )
    assert files_below(tmp_path / "pack") == files_below(tmp_path / "alone")
