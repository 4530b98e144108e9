"""Run `penstock pack` and `penstock index`: thin over `readers.pack` and `readers.build_index`.

`--on` names the workers that do the tasks by the address of their scheduler (Dask, Ray, MPI).
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape

from penstock.cache import ConfigError, FetchError, MissingDependencyError
from penstock.cache.base import format_size, usable_cores
from penstock.pipeline.cli.command_options import (
    AllowEmpty,
    Baseline,
    CacheFolder,
    DocumentMode,
    FieldPlaces,
    ForBatch,
    Format,
    ForNodes,
    ImageFields,
    IndexOut,
    Json,
    ManifestFile,
    MaxPixels,
    NumberType,
    On,
    PackFields,
    PackFolder,
    Quality,
    SampleStride,
    SampleWindow,
    ShardBytes,
    ShortSide,
    Shuffle,
    ShuffleSeed,
    Source,
    StorageOption,
    Vocabulary,
    Workers,
    parse_fields,
    parse_names,
    parse_places,
    parse_sampling,
    parse_storage_options,
)
from penstock.pipeline.cli.progress_bars import SampleProgress
from penstock.pipeline.plan import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers import PackSummary

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
        from penstock.cache import RayExecutor

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
    """Raise FetchError if no scheduler answers at an address: engines would wait for half a minute
    and longer. speaks: what listens there speaks first, as Dask's scheduler does."""
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


_SHARD_BYTES = "64MiB"
_BATCH = 2048  # of a node, where nobody says: 8 GPUs with 256 samples each


def pack(
    src: Source,
    dst: PackFolder,
    shuffle: Shuffle = True,
    seed: ShuffleSeed = 0,
    shard_bytes: ShardBytes = _SHARD_BYTES,
    for_nodes: ForNodes = None,
    for_batch: ForBatch = None,
    fields: PackFields = None,
    manifest: ManifestFile = None,
    short_side: ShortSide = None,
    quality: Quality = None,
    baseline: Baseline = False,
    image: ImageFields = None,
    format: Format = "auto",
    sample: SampleWindow = None,
    stride: SampleStride = None,
    dtype: NumberType = None,
    documents: DocumentMode = None,
    vocabulary: Vocabulary = None,
    allow_empty: AllowEmpty = False,
    max_pixels: MaxPixels = None,
    workers: Workers = 0,
    on: On = None,
    cache: CacheFolder = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Write a dataset as shards that are read fast: shuffled, every sample checked once.

    What is bad, in any of its fields, goes by name into DST/_penstock/quarantine.jsonl. Killed at
    any moment, the same command goes on after the last finished shard. Under torchrun or Slurm each
    rank packs its share.
    """
    from penstock.readers import pack as pack_dataset

    sampling = parse_sampling(
        sample=sample, stride=stride, dtype=dtype, documents=documents, vocabulary=vocabulary
    )
    with executor_on(on) as executor, SampleProgress("pack") as progress:
        summary = pack_dataset(
            src,
            dst,
            format=format,
            fields=parse_fields(fields),
            manifest=manifest,
            sampling=sampling,
            allow_empty=allow_empty,
            max_pixels=max_pixels,
            shuffle=shuffle,
            seed=seed,
            shard_bytes=_shards(shard_bytes, nodes=for_nodes, batch=for_batch),
            short_side=short_side,
            quality=quality,
            baseline=baseline,
            image=parse_names(image),
            workers=_threads(workers, on),
            **_share(on),
            progress=progress,
            storage_options=parse_storage_options(storage_option),
            cache=cache,
            executor=executor,
        )
    _report_pack(summary, dst, as_json=as_json)


def _shards(
    told: str, *, nodes: int | None, batch: int | None
) -> str | Callable[[NDArray[np.int64]], int]:
    """The size of shards, or how it follows from the samples'."""
    if nodes is None:
        if batch is not None:
            raise ConfigError("--for-batch is of the job of --for-nodes: pass that too.")
        return told
    if told != _SHARD_BYTES:
        raise ConfigError(f"Got --shard-bytes {told} and --for-nodes {nodes}, wanted one of them.")
    from penstock.pipeline.plan.sizing import shards_for

    return shards_for(nodes=nodes, global_batch=batch if batch is not None else _BATCH * nodes)


def _share(on: str | None) -> dict[str, Any]:
    """Rank and size of this process, as `pack` takes them. Where a launcher starts workers and one
    process hands out the work, ranks mean nothing."""
    world = World.detect() if on is None else World(0, 1)
    return {"rank": world.rank, "size": world.size}


def _report_pack(summary: PackSummary, dst: str, *, as_json: bool) -> None:
    _report(asdict(summary), as_json=as_json, place=f"{dst.rstrip('/')}/_penstock")
    if summary.complete:
        _warn_of_labels(dst)


def _threads(workers: int, on: str | None) -> int | None:
    """Return the workers of this process, or with --on of each task, None for its default of 1."""
    return workers or (usable_cores() if on is None else None)


def _warn_of_labels(dst: str) -> None:
    from penstock.pipeline.cli.index_report import warn_of_labels
    from penstock.readers import open_index

    warn_of_labels(open_index(dst))


def index(
    url: Source,
    out: IndexOut = None,
    format: Format = "auto",
    sample: SampleWindow = None,
    stride: SampleStride = None,
    dtype: NumberType = None,
    documents: DocumentMode = None,
    vocabulary: Vocabulary = None,
    manifest: ManifestFile = None,
    fields: FieldPlaces = None,
    allow_empty: AllowEmpty = False,
    max_pixels: MaxPixels = None,
    workers: Workers = 0,
    on: On = None,
    cache: CacheFolder = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Index a dataset where it lies: sizes, checksums, fields; samples of folders and tar files are
    checked once, of formats with chunks (Zarr, Parquet, …) metadata alone are read.

    A Dataset does the same on first use; here it can be done before the job, with a progress bar.
    """
    from penstock.readers import build_index

    sampling = parse_sampling(
        sample=sample, stride=stride, dtype=dtype, documents=documents, vocabulary=vocabulary
    )
    with executor_on(on) as executor, SampleProgress("index") as progress:
        summary = build_index(
            url,
            format=format,
            manifest=manifest,
            **sampling.arguments(),
            allow_empty=allow_empty,
            max_pixels=max_pixels,
            fields=parse_places(fields),
            out=out,
            cache=cache,
            workers=workers or usable_cores(),
            progress=progress,
            storage_options=parse_storage_options(storage_option),
            executor=executor,
        )
    _report(asdict(summary), as_json=as_json, place=summary.place)


def _report(summary: dict[str, Any], *, as_json: bool, place: str) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    console = Console()
    shards = summary["shards"]
    console.print(
        f"[bold green]done[/] {summary['samples']:,} samples in {shards:,} "
        f"shard{'s' * (shards != 1)}, {format_size(summary['bytes'])}, {summary['seconds']:.1f} s"
    )
    if not summary.get("complete", True):
        console.print("This rank's share; the pack is whole when the other ranks are done.")
    if summary.get("progressive"):
        console.print(
            f"[yellow]{summary['progressive']:,} progressive JPEGs[/], which take about 3 times as "
            "long to decode: --baseline rewrites them without loss, --quality with a little.",
            soft_wrap=True,
        )
    for reason, samples in summary["left_out"].items():
        console.print(f"[yellow]{samples:,} left out:[/] {escape(reason)}", soft_wrap=True)
    if summary["quarantined"]:
        console.print(
            f"[yellow]{summary['quarantined']:,} quarantined[/], each by name with its reason in "
            f"{place}/quarantine.jsonl",
            soft_wrap=True,
        )
