"""Run `penstock warm` by `pipeline.feed.warm`, and declare its options for the job and its nodes.

typer reads the options at run time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from penstock.cache import ConfigError, PlanError, ResumeError, disk
from penstock.cache.base import Peers, format_size
from penstock.pipeline import feed
from penstock.pipeline.cli.command_options import IndexedOptions, Json, Source
from penstock.pipeline.cli.commands import command
from penstock.pipeline.cli.output import ByteProgress, count, report
from penstock.pipeline.options import Order
from penstock.pipeline.plan import World, pod_index

if TYPE_CHECKING:
    from collections.abc import Iterator

_job = partial(Option, rich_help_panel="The job")
_peer = partial(Option, rich_help_panel="Other nodes")
# A group of its own, as long names need the width.
_order = partial(Option, rich_help_panel="If the job changes the default order")


@command(
    "warm",
    "penstock warm s3://bucket/photos-pack --cache cached --dry-run",
    "penstock warm 's3://bucket/web/*.parquet' --cache cached --max-bytes 500GB",
    "penstock warm s3://bucket/photos-pack --cache cached --nodes 4 --node-rank 0",
)
def warm(
    url: Source,
    *,
    cache: Path,
    max_bytes: str | None = None,
    world_size: Annotated[int | None, _job(min=1)] = None,
    nodes: Annotated[int | None, _job(min=1)] = None,
    node_rank: Annotated[int | None, _job(min=0)] = None,
    epoch: Annotated[int, _job(min=0)] = 0,
    seed: Annotated[int, _job()] = 0,
    global_batch_size: Annotated[int | None, _job(min=1)] = None,
    shuffle: Annotated[bool, _order()] = True,
    lanes: Annotated[int | None, _order(min=1)] = None,
    window: Annotated[int | None, _order(min=1)] = None,
    reshuffle: Annotated[float, _order(min=0, max=1)] = 0.0,
    state: Annotated[Path | None, _job(exists=True, dir_okay=False)] = None,
    if_empty: Annotated[bool, _job("--if-empty")] = False,
    peers: Annotated[str | None, _peer(metavar="HOST:PORT")] = None,
    peer_nodes: Annotated[str | None, _peer(metavar="HOST:PORT,…")] = None,
    peer_token_file: Annotated[Path | None, _peer()] = None,
    tls: Annotated[bool, _peer()] = True,
    workers: Annotated[int, Option(min=1)] = 4,
    dry_run: Annotated[bool, Option("--dry-run")] = False,
    data: IndexedOptions,
    as_json: Json = False,
) -> None:
    """Fetch the shards that this node will read into its cache, in the order of the job.

    On several nodes, the shards of a node depend on the job's seed and global batch: pass the same
    values, or the --state from which the job will resume. Under torchrun, srun or mpirun each node
    fetches its share, divided among its processes; in a Kubernetes Indexed Job, a pod's index is
    its node rank, and --nodes is required.

    After an interrupt, the same command resumes. It may run at the same time as the job: neither
    fetches what the other has fetched. For local data it does nothing, without an error.

    cache: The cache folder that the job will use.
    max_bytes: The cache's limit, such as "1.5TB", as the job will set it. By default the folder's
        recorded limit, else 90 % of the free space.
    world_size: Ranks of the job; by default those of the launcher, else one per node.
    nodes: Nodes of the job; by default those of the launcher, else 1.
    node_rank: Number of this node, from 0; by default the launcher's.
    epoch: Epoch that sets the order of fetching.
    seed: The job's seed.
    global_batch_size: The job's global batch; by default 256 per rank.
    shuffle: Whether the job shuffles.
    lanes: The job's Order(lanes=…).
    window: The job's Order(window=…).
    reshuffle: The job's Order(reshuffle=…).
    state: If the job resumes: a JSON file of what the loader's state_dict() returned. It sets seed,
        epoch, shuffle, lanes, window and reshuffle.
    if_empty: Fetch nothing if the cache already holds a part of the dataset: after a restart, nodes
        read what their caches hold, even if their ranks have changed.
    peers: Serve other nodes at this address, and request from their caches before the remote; needs
        --peer-nodes.
    peer_nodes: With --peers: the addresses of all nodes, in the order of their ranks.
    peer_token_file: With --peers: file with the nodes' shared secret; by default
        PENSTOCK_PEER_TOKEN.
    tls: With --peers: --no-tls turns encryption off on a private network.
    workers: Shards that are fetched in parallel.
    dry_run: Only show what would be fetched and whether it fits; data without an index are listed,
        not downloaded.
    """
    place = data.arguments_for(url)
    open_cache = partial(disk.DiskCache, max_bytes=max_bytes) if max_bytes else disk.DiskCache.at
    others = peers_of(peers, peer_nodes, peer_token_file, tls=tls)
    place["cache"] = open_cache(cache, peers=others)
    launched = _launched(nodes=nodes, node_rank=node_rank)
    order: dict[str, Any] = {
        "epoch": epoch,
        "seed": seed,
        "shuffle": shuffle,
        "order": Order(lanes=lanes, window=window, reshuffle=reshuffle),
        "global_batch_size": global_batch_size,
        "state": None if state is None else _read_state(state),
        "world": _node(launched, world_size=world_size, nodes=nodes, node_rank=node_rank),
        "process": (launched.local_rank, launched.local_size),
        "workers": workers,
        "dry_run": dry_run,
    }
    result = _fetched(url, place, order, if_empty=if_empty)
    share = "" if result is None else _share_words(order["world"], order["process"])
    shown = () if result is None else _lines(result, dry_run=dry_run, share=share)
    result = result or feed.WarmResult()
    values = {**asdict(result), "dry_run": dry_run, "share": share}
    values["failed"] = [{"uri": uri, "reason": reason} for uri, reason in result.failed]
    report(values, shown, as_json=as_json)
    raise typer.Exit(bool(result.failed))


def peers_of(
    address: str | None, nodes: str | None, token_file: Path | None, *, tls: bool
) -> Peers | None:
    """Return the settings of nodes that serve each other; None without --peers. Raises
    ConfigError."""
    if address is None:
        if nodes is not None or token_file is not None or not tls:
            raise ConfigError(
                "--peer-nodes, --peer-token-file and --no-tls need --peers HOST:PORT, the address "
                "of this node, but got none."
            )
        return None
    if nodes is None:  # a command has no process group through which nodes could exchange addresses
        raise ConfigError(
            f"--peers {address}: got no --peer-nodes, wanted the addresses of all nodes, the same "
            "on each: --peer-nodes 10.0.0.7:7077,10.0.0.8:7077."
        )
    listed = [node.strip() for node in nodes.split(",")]
    return Peers(address, token_file=token_file, tls=None if tls else False, nodes=listed)


_FAILURES_SHOWN = 20
_MOST_STATE_BYTES = 2**20  # they have less than 10 kB


def _fetched(
    url: str, place: dict[str, Any], order: dict[str, Any], *, if_empty: bool
) -> feed.WarmResult | None:
    """Fetch, and return the result; None, with the reason on stderr, if there is nothing to fetch.

    place: arguments of `Dataset`; order: arguments of `feed.warm`. Raises ConfigError.
    """
    from penstock.readers import Dataset, open_source

    if if_empty and order["process"][1] > 1:  # a process would see what another has just fetched
        raise ConfigError(
            f"--if-empty: got {order['process'][1]} processes on this node, wanted one (srun "
            "--ntasks-per-node=1)."
        )
    with open_source(url, allow_left_out=1, **place) as dataset, ByteProgress("warm") as bar:
        if order["dry_run"] and isinstance(dataset, Dataset):
            unindexed = dataset.unindexed_bytes()
            if unindexed:  # a dry run builds no index
                return feed.WarmResult(index_bytes=unindexed)
        remote, reason = dataset.remote_shards, ""
        if remote is None:
            reason = f"{dataset.url} is local and read in place: there is nothing to warm."
        elif if_empty and (held := int((remote.held_shares() > 0).sum())):
            reason = (
                f"{place['cache'].path}: the cache already holds {count(held, 'shard')} of "
                f"{dataset.url}, so nothing is fetched (--if-empty)."
            )
        if remote is not None and not reason:
            opened = sum(each.traffic().bytes_remote for each in remote.remotes)
            result = feed.warm(dataset, **order, progress=lambda state: _show_progress(bar, state))
            return replace(result, index_bytes=opened)
    # It is no error, for scripts that warm any data.
    Console(stderr=True).print(reason, highlight=False, markup=False, soft_wrap=True)
    return None


def _read_state(file: Path) -> object:
    """Return a file's JSON, which may not be a state. Raises ResumeError if it isn't JSON."""
    with file.open("rb") as opened:
        text = opened.read(_MOST_STATE_BYTES + 1)
    try:
        if len(text) > _MOST_STATE_BYTES:
            raise ValueError("it is too large")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResumeError(
            f"{file}: got a file that isn't JSON ({error}), wanted a state. Write the result of "
            "loader.state_dict() with json.dump; a checkpoint of torch.save doesn't work."
        ) from None


def _show_progress(bar: ByteProgress, state: feed.WarmState) -> None:
    left_out = f", {format_size(state.left_out_bytes)} don't fit" if state.left_out_bytes else ""
    bar(
        state.fetched_bytes + state.there_bytes,
        state.wanted_bytes - state.failed_bytes,
        f"{format_size(state.fetched_bytes)} from the remote, "
        f"{format_size(state.there_bytes)} already cached{left_out}",
    )


def _launched(*, nodes: int | None, node_rank: int | None) -> World:
    """Return the launcher's world; in a pod without a launcher, that of this process alone."""
    try:
        return World.detect()
    except PlanError:
        pod = pod_index()
        if pod is None:
            raise
        if nodes is None and node_rank is None:
            raise ConfigError(
                f"This is pod {pod} of an Indexed Job, but the number of pods is unknown: pass "
                f"--nodes (the Job's completions) to fetch the share of node {pod}, or --nodes 1 "
                "if each pod is a job of its own."
            ) from None
        return World(0, 1)


def _share_words(world: World, process: tuple[int, int]) -> str:
    """Describe the ranks whose share was fetched."""
    from penstock.pipeline.plan import node_ranks  # loads numpy

    first, end = node_ranks(world)
    ranks = f"rank {first}" if end == first + 1 else f"ranks {first} to {end - 1}"
    own = f", part {process[0] + 1} of {process[1]}" if process[1] > 1 else ""
    node = f"one of {world.nodes:,} nodes" if world.nodes > 1 else "the only node"
    return f"of {ranks} of {world.size}{own}, on {node}"


def _node(
    launched: World, *, world_size: int | None, nodes: int | None, node_rank: int | None
) -> World:
    """Return the world of this node's first rank: the options, else the launcher's values."""
    if world_size is None and nodes is None and node_rank is None:
        return launched
    nodes = nodes or max(1, launched.size // launched.local_size)
    world_size = world_size or max(launched.size, nodes)
    if node_rank is None:
        pod = pod_index() if launched.processes == 1 else None
        if pod is None and launched.size == 1 and nodes > 1:  # else all would fetch node 0's share
            raise ConfigError(
                f"--nodes {nodes}: got no --node-rank, and no launcher sets it. Pass --node-rank "
                f"0 to {nodes - 1}, a different one on each node."
            )
        node_rank = launched.rank // launched.local_size if pod is None else pod
        if pod is not None and nodes == 1:  # each pod is a job of its own
            node_rank = 0
    return feed.node_world(world_size, nodes=nodes, node_rank=node_rank)


def _lines(result: feed.WarmResult, *, dry_run: bool, share: str) -> Iterator[str]:
    index = format_size(result.index_bytes)
    if dry_run and result.index_bytes and not result.node_bytes:
        yield (
            f"there is no index yet: building it reads up to {index} of samples, which the cache "
            "keeps as far as they fit. Without --dry-run, this command does that first."
        )
        return
    rate = f", {format_size(result.bytes / result.seconds)}/s" if result.seconds else ""
    time = "" if dry_run else f" in {result.seconds:.1f} s{rate}"
    head = "would fetch" if dry_run else "[bold green]done[/] fetched"
    fetched = f"{count(result.objects, 'object')}, {format_size(result.bytes)}{time}"
    yield f"{head} {fetched}; {result.skipped:,} already cached ({share})"
    if result.index_bytes:
        yield f"before, opening or building the index fetched {index}"
    if result.left_out:
        yield (
            f"[yellow]{result.left_out:,} objects don't fit:[/] the cache keeps "
            f"{format_size(result.kept_bytes)} of the {format_size(result.node_bytes)} that this "
            "node reads; the rest is fetched from the remote in each epoch."
        )
    if result.failed:
        yield f"[bold red]{len(result.failed):,} failed[/]; run the command again to retry:"
    for uri, reason in result.failed[:_FAILURES_SHOWN]:
        yield escape(f"{uri}: {reason}")
    if (more := len(result.failed) - _FAILURES_SHOWN) > 0:
        yield f"and {more:,} more (--json lists all)"
