"""`penstock warm`: thin over `pipeline.feed.warm`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.datasets import Format, Json, StoreOptions, parse_options
from penstock.pipeline.cli.progress import ByteProgress
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    from penstock.pipeline.feed.share_fills import WarmState
    from penstock.pipeline.feed.warm import WarmResult

_FAILURES_SHOWN = 20

CacheFolder = Annotated[
    Path, typer.Option("--cache", help="The cache folder that the job will use.")
]
IndexFolder = Annotated[
    str | None, typer.Option("--index", help="Folder that `penstock index --out` wrote.")
]


def warm(
    url: Annotated[
        str, typer.Argument(help="Image folder, tar files or pack: any URL that a Dataset takes.")
    ],
    cache: CacheFolder,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="The cache's limit, as \"1.5TB\": the job's. Without: what the folder has, else "
            "90 % of the free space."
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of the job; by default as launched, else one a node."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the job; by default as launched, else 1.")
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(min=0, help="Which one this is, from 0; by default as launched."),
    ] = None,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch in whose order to fetch.")] = 0,
    seed: Annotated[int, typer.Option(help="The job's seed.")] = 0,
    global_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="The job's, over all ranks; by default 256 for each rank."),
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Whether the job shuffles.")
    ] = True,
    lanes: Annotated[int | None, typer.Option(min=1, help="If the job passes lanes=.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="If the job passes window=.")] = None,
    reshuffle: Annotated[
        float, typer.Option(min=0, max=1, help="If the job passes reshuffle=.")
    ] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Shards that are fetched at a time.")] = 4,
    index_folder: IndexFolder = None,
    format: Format = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be fetched, and if it fits.")
    ] = False,
    storage_option: StoreOptions = None,
    as_json: Json = False,
) -> None:
    """Fetch what this node will read into its cache, in the order in which the job reads it.

    Which shards a node of several reads depends on the job's seed and global batch: pass the same.
    Under torchrun or srun each node fetches its share, and a node's processes share that out.
    Interrupted, the same command goes on from there. It may run beside the job: they share fills.
    """
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.pipeline.feed.warm import warm as warm_dataset
    from penstock.readers import Dataset

    launched = World.detect()
    world = _node(launched, world_size=world_size, nodes=nodes, node_rank=node_rank)
    kept = DiskCache(cache, max_bytes=max_bytes) if max_bytes else DiskCache.at(cache)
    dataset = Dataset(
        url,
        format=format,
        cache=kept,
        index=index_folder,
        storage_options=parse_options(storage_option),
    )
    with dataset, ByteProgress("warm") as bar:

        def progress(state: WarmState) -> None:
            bar(
                state.fetched_bytes + state.there_bytes,
                state.wanted_bytes - state.failed_bytes,
                f"{format_size(state.fetched_bytes)} from the remote, "
                f"{format_size(state.there_bytes)} were there"
                + (
                    f", {format_size(state.left_out_bytes)} don't fit"
                    if state.left_out_bytes
                    else ""
                ),
            )

        result = warm_dataset(
            dataset,
            world=world,
            epoch=epoch,
            seed=seed,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            lanes=lanes,
            window=window,
            reshuffle=reshuffle,
            process=(launched.local_rank, launched.local_size),
            workers=workers,
            dry_run=dry_run,
            progress=progress,
        )
    _report(result, as_json=as_json, dry_run=dry_run)
    if result.failed:
        raise typer.Exit(1)


def _node(
    launched: World, *, world_size: int | None, nodes: int | None, node_rank: int | None
) -> World:
    """The world of this node's first rank: what was given, else what the launcher says."""
    from penstock.pipeline.feed.warm import node_world

    if world_size is None and nodes is None and node_rank is None:
        return launched
    nodes = nodes or max(1, launched.size // launched.local_size)
    world_size = world_size or max(launched.size, nodes)
    if node_rank is None:
        node_rank = launched.rank // launched.local_size
    return node_world(world_size, nodes=nodes, node_rank=node_rank)


def _report(result: WarmResult, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        facts = asdict(result)
        facts["failed"] = [{"uri": uri, "reason": reason} for uri, reason in result.failed]
        typer.echo(json.dumps({**facts, "dry_run": dry_run}))
        return
    console = Console()
    rate = f", {format_size(result.bytes / result.seconds)}/s" if result.seconds else ""
    head = "would fetch" if dry_run else "[bold green]done[/] fetched"
    console.print(
        f"{head} {result.objects:,} object{'s' * (result.objects != 1)}, "
        f"{format_size(result.bytes)}"
        + ("" if dry_run else f" in {result.seconds:.1f} s{rate}")
        + f"; {result.skipped:,} were there",
        soft_wrap=True,
    )
    if result.left_out:
        console.print(
            f"[yellow]{result.left_out:,} objects don't fit:[/] the cache keeps "
            f"{format_size(result.kept_bytes)} of the {format_size(result.node_bytes)} that this "
            "node reads, the rest comes from the remote in each epoch.",
            soft_wrap=True,
        )
    if result.failed:
        console.print(f"[bold red]{len(result.failed):,} failed[/]; the same command tries again:")
        for uri, reason in result.failed[:_FAILURES_SHOWN]:
            console.print(f"{uri}: {reason}", markup=False, highlight=False, soft_wrap=True)
        if (more := len(result.failed) - _FAILURES_SHOWN) > 0:
            console.print(f"and {more:,} more (--json lists all)")
