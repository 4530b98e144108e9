"""Declare the options of `penstock plan` that describe the data, the job, a node and the store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from typer import Option

_PLAIN = re.compile(r"[0-9]+([,_]?[0-9]{3})*")
_POWER = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}")


def parse_count(value: str | int) -> int:
    """Parse an integer as people write it: 1281167, 1,281,167, 1_281_167 or 1e9."""
    text = str(value).strip()
    if _PLAIN.fullmatch(text):
        return int(text.replace(",", "").replace("_", ""))
    if _POWER.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    raise typer.BadParameter(
        f"got {text!r}, wanted a whole number such as 1281167, 1,281,167 or 1e9."
    )


_data = partial(Option, rich_help_panel="The data")
_job = partial(Option, rich_help_panel="The job")
_node = partial(Option, rich_help_panel="A node")
_store = partial(Option, rich_help_panel="The store")
_number = {"parser": parse_count, "metavar": "N"}
_count = partial(_job, **_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingOptions:
    """The options that describe a job and its hardware.

    samples: Number of samples; by default the URL's, or the model's published dataset's.
    sample_bytes: Mean stored size of a sample, such as "115KB"; by default that of the URL or the
        model.
    spread: Standard deviation of the samples' sizes, divided by their mean.
    shard_bytes: Size of a shard; by default the URL's, else chosen for the job: 64MiB or less.
    model: A published model, alone or on an accelerator, which sets samples/s, batch and sample
        size: unet3d, retinanet, resnet50, cosmoflow, flux, dgx-pod, b200-unet3d, h100-resnet50, ….
    samples_per_s: Instead of --model: samples a second that one GPU consumes if it never waits.
    nodes: Nodes of the job.
    gpus: GPUs per node, with one rank each.
    batch: Batch size of a GPU; by default the model's, else 256.
    global_batch: Batch size of all GPUs, instead of --batch.
    epochs: Epochs of the job.
    cpu_s_per_1000: CPU-seconds to decode and augment 1,000 samples, as `penstock bench` measures;
        0, the default, if the GPU decodes.
    peers: Nodes request from each other's caches before the store.
    tls: With --peers: --no-tls turns encryption off on a private network.
    moved: Assume filled caches; other nodes hold this share of what a node reads: 0 after
        `penstock warm`, 1/N after adding one of N nodes, 0.5 after halving their number, 1 - 1/N
        for nodes in a new order. By default the caches are empty.
    reshuffle: The loader's reshuffle: share of the shards that change lanes in each epoch.
    cores: CPU cores; 128 is usual for nodes with 8 GPUs.
    ram: Memory; half of it is available as page cache.
    nvme: Size of the cache (DiskCache's max_bytes); 0: no cache.
    nvme_bandwidth: Bandwidth of the cache's disk.
    nic: Network bandwidth in each direction: bits ("100Gb/s") or bytes ("12.5GB/s").
    store_bandwidth: Bandwidth for all nodes together, by default like that of a small shared
        file system.
    store_latency: Milliseconds to a request's first byte; 10 to 100 for object stores.
    stream_bandwidth: Bandwidth of one connection, by default one that is usual for object stores.
    store_requests_per_s: Requests a second for all nodes; S3 allows 5,500 per prefix.
    price: Price of 1,000 requests, in any currency.
    local: With --local, each node has the data on its own disk; the default for a local URL without
        options of a store.
    """

    samples: Annotated[int | None, _data(**_number)] = None
    sample_bytes: Annotated[str | None, _data()] = None
    spread: Annotated[float, _data()] = 0.0
    shard_bytes: Annotated[str | None, _data()] = None
    model: Annotated[str | None, _job()] = None
    samples_per_s: Annotated[float | None, _job()] = None
    nodes: Annotated[int, _count()] = 1
    gpus: Annotated[int, _count()] = 8
    batch: Annotated[int | None, _count()] = None
    global_batch: Annotated[int | None, _count("--global-batch-size")] = None
    epochs: Annotated[int, _count()] = 90
    cpu_s_per_1000: Annotated[float | None, _job("--cpu-s-per-1000")] = None
    peers: Annotated[bool, _job("--peers/--no-peers")] = False
    tls: Annotated[bool, _job()] = True
    moved: Annotated[float | None, _job()] = None
    reshuffle: Annotated[float, _job()] = 0.0
    cores: Annotated[float, _node()] = 128
    ram: Annotated[str, _node()] = "1TB"
    nvme: Annotated[str, _node()] = "1.5TB"
    nvme_bandwidth: Annotated[str, _node()] = "5GB/s"
    nic: Annotated[str, _node()] = "100Gb/s"
    store_bandwidth: Annotated[str, _store()] = "10GB/s"
    store_latency: Annotated[float, _store()] = 30.0
    stream_bandwidth: Annotated[str, _store()] = "100MB/s"
    store_requests_per_s: Annotated[float, _store()] = 5500.0
    price: Annotated[float | None, _store("--price-per-1000-requests")] = None
    local: Annotated[bool | None, _store("--local/--remote")] = None
