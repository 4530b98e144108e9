"""Index with executors: the result equals that of one process, even if workers or the driver
die."""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ConfigError, DatasetNotFoundError, WorkerError
from penstock.readers import Facts, Rejection, build_index, open_index
from penstock.readers.index import results_of_json, results_to_json
from tests import executors, images
from tests.files import files_below
from tests.tars import archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """150 photographs in 3 classes, and a few files that aren't photographs."""
    return images.flawed_folder(tmp_path / "data" / "set", samples=150)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Four tar files of photographs, with one bad sample."""
    (tmp_path / "tars").mkdir()
    for number in range(4):
        members = {f"{i:03d}.jpg": images.jpeg(10 * number + i) for i in range(8)}
        members |= {f"{i:03d}.cls": b"%d" % (i % 3) for i in range(8)}
        members |= {"009.jpg": images.BAD["text.jpg"][0], "009.cls": b"1"} if number == 2 else {}
        (tmp_path / "tars" / f"{number}.tar").write_bytes(archive(members))
    return tmp_path / "tars"


def build(url: Path, out: Path, **options: Any) -> Any:
    return build_index(url, out=out, **({"verify": executors.verify} | options))


def interrupt(done: int) -> None:
    if done > 10:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_the_index_is_that_of_one_process(
    request: pytest.FixtureRequest, tmp_path: Path, processes: Executor, kind: str
) -> None:
    url, report = request.getfixturevalue(kind), []
    alone = build(url, tmp_path / "alone")
    here = build(
        url, tmp_path / "here", executor=processes, progress=lambda *each: report.append(each)
    )
    assert files_below(tmp_path / "here") == files_below(tmp_path / "alone")
    assert (here.samples, here.quarantined) == (alone.samples, alone.quarantined)
    assert report[-1][0] == report[-1][1]


def test_a_worker_and_a_driver_that_die(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tars, tmp_path / "alone")
    watched = executors.RecordingExecutor()
    with pytest.raises(KeyboardInterrupt):  # as good as killed: nothing is tidied
        build(tars, tmp_path / "index", executor=watched, progress=lambda done, *_: interrupt(done))
    assert not (tmp_path / "index" / "manifest.arrow").exists()
    executors.plan_kills(tmp_path / "kills", 1, monkeypatch.setenv)
    with (
        ProcessPoolExecutor(1) as pool,
        pytest.raises(WorkerError, match=r"of \d+ shards.*continue from there"),
    ):
        build(tars, tmp_path / "index", executor=pool)
    last = executors.RecordingExecutor()
    build(tars, tmp_path / "index", executor=last)
    assert len(last.tasks) < 4
    assert files_below(tmp_path / "index") == files_below(tmp_path / "alone")


def test_only_the_changed_files_of_a_dataset_are_read(
    folder: Path, tmp_path: Path, processes: Executor
) -> None:
    place = tmp_path / "index"
    open_index(folder, index=place, verify=executors.verify, executor=processes)
    (folder / "class-0" / "new.jpg").write_bytes(images.jpeg(7777))
    os.utime(folder / "class-0" / "0000.jpg", ns=(5, 5))
    watched = executors.RecordingExecutor()
    index = open_index(folder, index=place, verify=executors.verify, executor=watched)
    assert index.samples == 151
    build(folder, tmp_path / "alone")
    again = open_index(folder, index=tmp_path / "alone", verify=executors.verify)
    assert index.fingerprint == again.fingerprint
    # It exists: no worker starts.
    idle = executors.RecordingExecutor()
    assert open_index(folder, index=place, executor=idle).samples == 151
    assert not idle.tasks


def test_refused_arguments_and_a_worker_without_the_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = executors.RecordingExecutor()
    for url, wrong in (
        ("s3://bucket/set", {"storage_options": {"secret": "wJalrXUtnFEMI"}}),
        (folder, {"filesystem": object()}),
        (folder, {"executor": "dask"}),
        (folder, {"verify": lambda _: []}),
    ):
        with pytest.raises(ConfigError):
            build(url, tmp_path / "index", **({"executor": watched} | wrong))
    assert not watched.tasks
    real = watched.submit

    def elsewhere(fn: Any, /, *args: Any) -> Any:
        if folder.exists():
            os.rename(folder, tmp_path / "gone")
        return real(fn, *args)

    monkeypatch.setattr(watched, "submit", elsewhere)
    with pytest.raises(DatasetNotFoundError, match=r"Worker .*process.*set doesn't exist on this"):
        build(folder, tmp_path / "index", executor=watched)


def test_the_results_of_a_shard_survive_a_file() -> None:
    facts = Facts(crc32c=7, start=2, size=9, shape=(3, 4, 5), codec="<f4:F")
    found = [{"a": facts, "b": replace(facts, is_progressive=True)}, Rejection("bad\udcff"), {}]
    data = results_to_json(found)
    assert results_of_json(data, 3) == found
    for wrong in (b"", b"3", b"[3]", b'[{"a": [1]}]', b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011
            results_of_json(wrong, 1)
    with pytest.raises(ValueError, match="wanted 2"):
        results_of_json(data, 2)


class Odd(Executor):
    """An executor whose behaviour a test chooses."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        del fn, args, kwargs
        return self._answer()


def made_up() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result({"x": 1})
    return future


def gone() -> None:
    raise RuntimeError("cannot schedule new futures after shutdown")


@pytest.mark.parametrize(
    ("executor", "kind", "words"),
    [
        (Odd(gone), WorkerError, "Odd accepts no tasks .*after shutdown.*continue"),
        (Odd(lambda: 5), ConfigError, "submit returned int, wanted a Future"),
        (Odd(made_up), WorkerError, "answered a task with dict"),
        (Odd, ConfigError, "wanted an Executor"),
        ("dask", ConfigError, "wanted an Executor"),
    ],
)
def test_objects_that_arent_executors_are_refused(
    tmp_path: Path, executor: Any, kind: type[Exception], words: str
) -> None:
    folder = images.class_folder(tmp_path / "set", samples=4)
    with pytest.raises(kind, match=words):
        open_index(folder, verify=executors.verify, executor=executor)
