"""`--on`: the work done by others' workers, and schedulers that aren't there."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest

from penstock.cache import ConfigError, FetchError, MissingDependencyError, PenstockError
from penstock.pipeline.cli import executor_on, main, pack_command
from tests import images
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def run(*arguments: object) -> None:
    assert main([str(each) for each in arguments]) == 0


def everything(root: Path) -> dict[str, bytes]:
    """All files below root by name."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_pack_and_index_on_dask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("nvidia.dali")
    folder = images.class_folder(tmp_path / "set", samples=12)
    run("pack", folder, tmp_path / "alone", "--shard-bytes", 9000)
    run("index", folder, "--out", tmp_path / "index-alone")
    capsys.readouterr()
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as one:
        on = one.scheduler_address.replace("tcp://", "dask://")
        run("pack", folder, tmp_path / "p", "--shard-bytes", 9000, "--on", on, "--json")
        told = capsys.readouterr().out
        run("index", folder, "--out", tmp_path / "index", "--on", on)
    assert json.loads(told)["samples"] == 12
    assert everything(tmp_path / "p") == everything(tmp_path / "alone")
    assert everything(tmp_path / "index") == everything(tmp_path / "index-alone")


@pytest.mark.parametrize(
    "on", ["", "dask", "dask:", "dask://", "spark://h:1", "dask-scheduler-file:", "dask://h:x"]
)
def test_addresses_that_are_none(on: str) -> None:
    with pytest.raises(ConfigError, match="wanted dask://HOST:PORT"), executor_on(on):
        pass


def test_a_scheduler_file_that_is_not_there(tmp_path: Path) -> None:
    on = f"dask-scheduler-file:{tmp_path / 'none.json'}"
    with pytest.raises(ConfigError, match="doesn't exist"), executor_on(on):
        pass
    for text in ("root:x:0:0", "{}", "[]", '{"address": null}'):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(ConfigError, match="isn't a scheduler file"), executor_on(on):
            pass


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_scheduler_that_is_not_there(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    wanted = r"--on \w+://127\.0\.0\.1:\d+: no scheduler answers"
    on, errors = f"{kind}://127.0.0.1:{port}", (FetchError, MissingDependencyError)
    with pytest.raises(errors) as caught, executor_on(on):
        pass
    caught.match(wanted if isinstance(caught.value, FetchError) else "Ray isn't installed")
    assert time.monotonic() - began < PATIENCE_S


def test_a_port_where_something_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.cli.pack_command.CONNECT_S", 0.2)
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        on = f"dask://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(FetchError, match="no scheduler answers"), executor_on(on):
            pass


def test_an_address_of_ipv6_keeps_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextlib.contextmanager
    def dask(_: str, *, address: str) -> Iterator[None]:
        asked.append(address)
        yield

    monkeypatch.setattr(pack_command, "check_answers", lambda *_, **__: None)
    monkeypatch.setattr(pack_command, "dask_executor", dask)
    for on in ("dask://[fd00::7]:8786", "dask://10.0.0.7"):
        with executor_on(on):
            pass
    assert asked == ["tcp://[fd00::7]:8786", "tcp://10.0.0.7:8786"]


def test_mpi_needs_workers_or_says_what_is_missing() -> None:
    wanted = r"mpi4py isn't installed|mpi4py\.futures"
    with pytest.raises(PenstockError, match=wanted), executor_on("mpi"):
        pass
