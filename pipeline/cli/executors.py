"""`--on`: whose workers do the work, by an address."""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.cache.errors import ConfigError, FetchError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

KINDS = "dask://HOST:PORT, dask-scheduler-file:FILE, ray://HOST:PORT, ray or mpi"
CONNECT_S = 5.0
"""So long a scheduler may take to answer."""

_MOST_FILE = 2**20
_DASK_PORT, _RAY_PORT = 8786, 10001


@contextmanager
def executor_on(on: str | None) -> Iterator[Executor | None]:
    """The executor at an address, closed at the end; None without one.

    Raises ConfigError, MissingDependencyError, and FetchError where nobody answers.
    """
    if on is None:
        yield None
        return
    kind, _, rest = on.partition(":")
    if kind == "dask" and rest.startswith("//"):
        host, port = _address(on, _DASK_PORT)
        _check_answers(on, host, port, speaks=True)
        place = f"[{host}]" if ":" in host else host  # an IPv6 address
        with _dask(on, address=f"tcp://{place}:{port}") as executor:
            yield executor
    elif kind == "dask-scheduler-file" and rest:
        _check_scheduler_file(on, rest)
        with _dask(on, scheduler_file=rest) as executor:
            yield executor
    elif on == "mpi":
        with _mpi() as executor:
            yield executor
    elif on == "ray" or (kind == "ray" and rest.startswith("//")):
        from penstock.cache.ray_executor import RayExecutor

        if on != "ray":
            _check_answers(on, *_address(on, _RAY_PORT))
        try:
            executor = RayExecutor("auto" if on == "ray" else on)
        except ConnectionError as error:
            raise _unreachable(on, error) from error
        with executor:
            yield executor
    else:
        raise ConfigError(f"--on: got {on!r}, wanted {KINDS}.")


def _address(on: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(on)
        host, port = parts.hostname or "", parts.port or port
    except ValueError as error:
        raise ConfigError(f"--on: got {on!r} ({error}), wanted {KINDS}.") from None
    if not host:
        raise ConfigError(f"--on: got {on!r} without a host, wanted {KINDS}.")
    return host, port


def _check_scheduler_file(on: str, path: str) -> None:
    """Dask waits for a file that isn't there, and fails in its own ways at one that is another."""
    if not os.path.exists(path):
        raise ConfigError(f"--on: got {on}, and there is no file {path}. Is the scheduler up?")
    try:
        with open(path, encoding="utf-8") as file:
            told = json.loads(file.read(_MOST_FILE))
    except (OSError, ValueError):
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("address"), str):
        raise ConfigError(
            f"--on: got {on}, and {path} isn't what a scheduler writes, JSON with its address. "
            "Pass the path that `dask scheduler --scheduler-file` was given."
        )


def _check_answers(on: str, host: str, port: int, *, speaks: bool = False) -> None:
    """Engines wait for their schedulers for half a minute and longer; a port tells at once.
    speaks: what listens there speaks first, as Dask's scheduler does."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            if speaks and not connection.recv(1):
                raise ConnectionError("it hangs up: is that a scheduler's port?")
    except OSError as error:
        raise _unreachable(on, error) from error


def _unreachable(on: str, error: BaseException) -> FetchError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return FetchError(
        f"--on {on}: no scheduler answers there ({reason}). Is it running, and can this machine "
        "reach its port?",
        uri=on,
    )


@contextmanager
def _dask(on: str, **address: Any) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(
            f"Dask isn't installed ({error}): pip install distributed, here and where its workers "
            "run."
        ) from error
    try:
        client = Client(**address, timeout=CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise _unreachable(on, error) from error
    with client:
        yield client.get_executor()


@contextmanager
def _mpi() -> Iterator[Executor]:
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor
    except ImportError as error:
        raise MissingDependencyError(
            f"mpi4py isn't installed ({error}): pip install mpi4py, and have MPI's own libraries."
        ) from error
    if MPI.COMM_WORLD.Get_size() == 1:
        raise ConfigError(
            "--on mpi: this is the only process, so there are no workers. Start it as: mpiexec -n "
            "9 python -m mpi4py.futures -m penstock.pipeline.cli pack … --on mpi (one of the "
            "processes drives, the others work)."
        )
    with MPIPoolExecutor() as executor:
        yield executor
