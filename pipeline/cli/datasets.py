"""`penstock pack | index`: thin over `penstock.pack` and `penstock.index`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from penstock.cache.base.limits import usable_cores
from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.executors import executor_on
from penstock.pipeline.cli.options import (
    AllowEmpty,
    Baseline,
    CacheFolder,
    DocumentMode,
    FieldPlaces,
    ForBatch,
    Format,
    ForNodes,
    ImageFields,
    IndexedSource,
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
from penstock.pipeline.cli.progress import SampleProgress
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers import PackSummary

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
    from penstock.pipeline.plan.sizing.geometry import shards_for

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
    """Of this process; of each task where others do the work, 1 unless told."""
    return workers or (usable_cores() if on is None else None)


def _warn_of_labels(dst: str) -> None:
    from penstock.pipeline.cli.index_report import warn_of_labels
    from penstock.readers import open_index

    warn_of_labels(open_index(dst))


def index(
    url: IndexedSource,
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
