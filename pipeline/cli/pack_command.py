"""Run `penstock pack` and `penstock index` by `readers.pack` and `readers.build_index`.

`--on` names the scheduler (Dask, Ray, MPI) whose workers run the tasks.
"""

from __future__ import annotations

import json
import socket
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from rich.markup import escape
from typer import Argument, Option

from penstock.cache import ConfigError, FetchError, MissingDependencyError
from penstock.cache.base import format_size, usable_cores
from penstock.pipeline.cli.command_options import (
    DatasetOptions,
    Json,
    On,
    Source,
    Workers,
    parse_names,
    parse_places,
)
from penstock.pipeline.cli.commands import command
from penstock.pipeline.cli.output import SampleProgress, count, report
from penstock.pipeline.plan import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    import numpy as np
    from numpy.typing import NDArray

KINDS = "dask://HOST:PORT, dask-scheduler-file:FILE, ray://HOST:PORT, ray or mpi"
CONNECT_S = 5.0
"""The longest time in which a scheduler must answer."""

_MOST_FILE = 2**20
_PORTS = {"dask": 8786, "ray": 10001}


def executor_on(on: str | None) -> AbstractContextManager[Executor | None]:
    """Connect to the executor at an address, for a with statement; None without an address.

    Raises ConfigError, MissingDependencyError, and FetchError if no scheduler answers.
    """
    if on is None:
        return nullcontext()
    kind, _, rest = on.partition(":")
    if kind in _PORTS and rest.startswith("//"):
        host, port = _address(on, _PORTS[kind])
        check_answers(on, host, port, speaks=kind == "dask")
        place = f"[{host}]" if ":" in host else host  # an IPv6 address
        return dask_executor(on, f"tcp://{place}:{port}") if kind == "dask" else _ray(on, on)
    if kind == "dask-scheduler-file" and rest:
        return dask_executor(on, _scheduler_address(on, rest))
    if on == "ray":
        return _ray(on, "auto")
    if on == "mpi":
        return _mpi()
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


def _scheduler_address(on: str, path: str) -> str:
    """Return the address in the file of a Dask scheduler. Dask itself waits for a missing file, and
    fails with unclear errors for any other file."""
    try:
        with open(path, encoding="utf-8") as file:
            address: str = json.loads(file.read(_MOST_FILE))["address"]
        return address + ""  # raises TypeError unless it is a text
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--on: got {on} ({error!r:.200}), wanted the file that a running scheduler has "
            "written: pass the path of `dask scheduler --scheduler-file`."
        ) from None


def check_answers(on: str, host: str, port: int, *, speaks: bool = False) -> None:
    """Raise FetchError if no scheduler answers at an address; Dask and Ray would wait for half a
    minute or longer. speaks: the server sends the first bytes, as Dask's scheduler does."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            if speaks and not connection.recv(1):
                raise ConnectionError("it closes the connection: check that this is its port")
    except OSError as error:
        raise _unreachable(on, error) from error


def _unreachable(on: str, error: BaseException) -> FetchError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return FetchError(
        f"--on {on}: no scheduler answers there ({reason}). Check that it runs and that this "
        "machine can reach its port.",
        uri=on,
    )


@contextmanager
def dask_executor(on: str, address: str) -> Iterator[Executor]:
    """Connect to a Dask scheduler."""
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(
            f"Dask isn't installed ({error}). Run pip install distributed, here and on its workers."
        ) from error
    try:
        client = Client(address, timeout=CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise _unreachable(on, error) from error
    with client:
        yield client.get_executor()


def _ray(on: str, address: str) -> Executor:
    from penstock.cache import RayExecutor

    try:
        return RayExecutor(address)
    except ConnectionError as error:
        raise _unreachable(on, error) from error


def _mpi() -> AbstractContextManager[Executor]:
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor
    except ImportError as error:
        raise MissingDependencyError(
            f"mpi4py isn't installed ({error}). Install MPI and run pip install mpi4py."
        ) from error
    if MPI.COMM_WORLD.Get_size() == 1:
        raise ConfigError(
            "--on mpi: got only one process, so there are no workers. Start it as: mpiexec -n 9 "
            "python -m mpi4py.futures -m penstock.pipeline.cli pack … --on mpi (one process "
            "schedules, the others work)."
        )
    executor: AbstractContextManager[Executor] = MPIPoolExecutor()
    return executor


_SHARD_BYTES = "64MiB"
_BATCH = 2048  # the default batch of a node: 8 GPUs with 256 samples each


@command(
    "pack",
    "penstock pack photos photos-pack",
    "penstock pack photos photos-small --short-side 256 --quality 90",
    "penstock pack s3://bucket/cells.zarr cells-pack --cache cached",
)
def pack(
    src: Source,
    dst: Annotated[str, Argument()],
    *,
    shuffle: bool = True,
    seed: int = 0,
    shard_bytes: str = _SHARD_BYTES,
    for_nodes: int | None = None,
    for_batch: int | None = None,
    short_side: Annotated[int | None, Option(min=1)] = None,
    quality: Annotated[int | None, Option(min=1, max=100)] = None,
    baseline: Annotated[bool, Option("--baseline")] = False,
    image: str | None = None,
    workers: Workers = 0,
    on: On = None,
    data: DatasetOptions,
    as_json: Json = False,
) -> None:
    """Write a dataset as a shuffled pack, the format that is read fastest, and check every sample.

    Samples with a bad field are left out and listed in DST/_penstock/quarantine.jsonl. After an
    interrupt or a kill, the same command resumes after the last finished shard. Under torchrun or
    Slurm each rank packs its share.

    dst: Folder of the pack: a new one, or one to resume.
    shuffle: Shuffle samples across shards once, on disk; --no-shuffle keeps the source's order and
        ids.
    seed: Seed of that shuffle.
    shard_bytes: Size of a shard, the unit that is fetched and cached.
    for_nodes: Choose the shard size for a job on this many nodes, at most 64MiB, instead of
        --shard-bytes (docs/howto/sizes.md).
    for_batch: With --for-nodes: the job's global batch; by default 2,048 per node.
    short_side: Shrink larger images to this short side, in pixels, and write them as upright
        baseline JPEGs, with their masks, boxes and keypoints. Other images stay unchanged.
    quality: JPEG quality of rewritten images (default: 92); without --short-side all images are
        rewritten at their size.
    baseline: Rewrite progressive JPEGs as baseline JPEGs without loss; these decode faster.
        Needs the extra 'transcode'.
    image: Image fields that --short-side, --quality and --baseline change, such as left,right
        (default: all).
    """
    from penstock.pipeline.cli.dataset_report import warn_of_labels
    from penstock.readers import check_left_out, open_index
    from penstock.readers import pack as pack_dataset

    world = World.detect() if on is None else World(0, 1)  # with --on, one process schedules all
    with executor_on(on) as executor, SampleProgress("pack") as progress:
        summary = pack_dataset(
            src,
            dst,
            **data.description(),
            shuffle=shuffle,
            seed=seed,
            shard_bytes=_shards(shard_bytes, nodes=for_nodes, batch=for_batch),
            short_side=short_side,
            quality=quality,
            baseline=baseline,
            image=parse_names(image),
            workers=workers or (usable_cores() if on is None else None),  # of a task by default 1
            rank=world.rank,
            size=world.size,
            progress=progress,
            executor=executor,
        )
    values = asdict(summary)
    report(values, _lines(values, place=f"{dst.rstrip('/')}/_penstock"), as_json=as_json)
    if summary.complete:
        warn_of_labels(packed := open_index(dst))
        check_left_out(packed)


def _shards(
    size: str, *, nodes: int | None, batch: int | None
) -> str | Callable[[NDArray[np.int64]], int]:
    """Return the size of shards, or a function that computes it from the sizes of samples."""
    if nodes is None:
        if batch is not None:
            raise ConfigError("--for-batch needs --for-nodes: pass both.")
        return size
    if size != _SHARD_BYTES:
        raise ConfigError(f"Got --shard-bytes {size} and --for-nodes {nodes}, wanted one of them.")
    from penstock.pipeline.plan.sizing import shards_for

    return shards_for(nodes=nodes, global_batch=batch if batch is not None else _BATCH * nodes)


@command(
    "index",
    "penstock index photos",
    "penstock index photos --out photos-index",
    "penstock index s3://bucket/era5.zarr --out s3://bucket/era5.penstock",
)
def index(
    url: Source,
    *,
    out: str | None = None,
    workers: Workers = 0,
    on: On = None,
    data: DatasetOptions,
    as_json: Json = False,
) -> None:
    """Index a dataset in place: sizes, checksums and fields.

    Samples of folders and tar files are read and checked once; of chunked formats (Zarr, Parquet,
    …) only the metadata is read. A Dataset does the same at its first use; this command does it
    before the job, with a progress bar.

    out: Folder for the index; for remote data also a URL of the same store. By default it is next
        to local data (photos.penstock), else in --cache, else in the user's cache directory.
    """
    from penstock.readers import build_index, check_left_out, open_index

    arguments = data.arguments() | {"fields": parse_places(data.fields), "out": out}
    arguments["workers"] = workers or usable_cores()
    with executor_on(on) as executor, SampleProgress("index") as progress:
        summary = build_index(url, **arguments, progress=progress, executor=executor)
    values = asdict(summary)
    report(values, _lines(values, place=summary.place), as_json=as_json)
    if summary.left_out:
        check_left_out(open_index(url, **data.description(), index=out))


def _lines(summary: dict[str, Any], *, place: str) -> Iterator[str]:
    """Yield the lines of a report. place: the folder of the quarantine."""
    shards, size = count(summary["shards"], "shard"), format_size(summary["bytes"])
    total = f"{summary['samples']:,} samples in {shards}, {size}"
    yield f"[bold green]done[/] {total}, {summary['seconds']:.1f} s"
    if not summary.get("complete", True):
        yield "This was this rank's share; the other ranks complete the pack."
    if summary.get("progressive"):
        yield (
            f"[yellow]{summary['progressive']:,} progressive JPEGs[/] take about 3 times as long "
            "to decode: --baseline rewrites them without loss, --quality with a small loss."
        )
    for reason, samples in summary["left_out"].items():
        yield f"[yellow]{samples:,} left out:[/] {escape(reason)}"
    if summary["quarantined"]:
        listed = f"{place}/quarantine.jsonl lists their names and reasons"
        yield f"[yellow]{summary['quarantined']:,} quarantined[/]; {listed}"
