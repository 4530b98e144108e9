"""Describe the inputs of a sizing: the data, a node, the store, the job and unit costs.

All are figures of one machine or one job, in bytes, seconds and samples. The CPU costs of moving
bytes were measured; docs/sizing.md names the machine. Faster cores need fewer CPU-seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.cache.base import FetchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 1e24
"""Of any figure: a yottabyte."""


def check_count(what: str, value: object, *, least: int = 1) -> None:
    """Raise ConfigError for what isn't a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}: got {value!r}, wanted a whole number from {least} on.")


def check_figure(what: str, value: float, *, may_be_zero: bool = False, unit: str = "") -> None:
    """Raise ConfigError for what isn't a finite number above 0 (or 0), or beyond any machine."""
    if math.isfinite(value) and value > _MOST:
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted at most {_MOST:g}.")
    good = math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))
    if not good:
        least = "0 or more" if may_be_zero else "more than 0"
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted {least}.")


FETCH_S_PER_GB, FETCH_S_PER_REQUEST = 0.63, 0.12e-3
"""Of the client of a store: 0.63, 0.75 and 2.4 CPU-s a GB in ranges of 8 MiB, 1 MiB and 64 KiB."""

READ_S_PER_GB = 0.35
"""Of reading and checking samples that are on the local disk or in memory."""

PEER_CLIENT_S_PER_GB, PEER_SERVER_S_PER_GB = 0.47, 0.24
"""Of ranges of 8 MiB from another node's cache, plain HTTP: the client's checksums, its writes to
disk and its books among it."""

PEER_TLS_CLIENT_S_PER_GB, PEER_TLS_SERVER_S_PER_GB = 0.95, 0.69
"""Of the same, encrypted: 0.70 + 0.69 were measured without writes and books, which take 0.25 plain
(0.47 less 0.22 without them)."""

NIC_PAYLOAD = 1448 / 1538
"""Of what a network carries: TCP's payload of a full Ethernet frame, its gap and headers among it
(40 bytes of IP and TCP, 12 of time stamps, 38 of Ethernet)."""

RAM_SHARE = 0.5
"""Of a node's memory, that the kernel may keep cached files in: the rest is the job's."""

REQUEST_BYTES = FetchPolicy().range_bytes
CONNECTIONS_A_RANK = FetchPolicy().start_connections
"""That a rank begins with; where more bring more it goes up to half as many more, by and by."""

OPENERS = 16
"""Shards that a rank opens at a time, as `readers.reading.open_shards` does."""

MARGIN_SHARE = 0.002
"""Of the cache's limit, that isn't for shards."""


def fetch_cpu_s(size_bytes: float, requests: float) -> float:
    """CPU seconds to fetch so many bytes from a store by so many requests."""
    return FETCH_S_PER_GB * size_bytes / 1e9 + FETCH_S_PER_REQUEST * requests


def peer_cpu_s(size_bytes: float, *, tls: bool) -> float:
    """CPU seconds of both sides for bytes that come from peers."""
    if tls:
        return (PEER_TLS_CLIENT_S_PER_GB + PEER_TLS_SERVER_S_PER_GB) * size_bytes / 1e9
    return (PEER_CLIENT_S_PER_GB + PEER_SERVER_S_PER_GB) * size_bytes / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFigures:
    """The data. sample_bytes: mean stored size of a sample; spread: standard deviation of these
    sizes over their mean. shards: that there are, None where a pack is still to be written.
    shuffled: samples lie in random order, as `pack` writes them. icc: label correlation inside a
    shard, None if unknown."""

    samples: int
    sample_bytes: float
    spread: float = 0.0
    shards: int | None = None
    shuffled: bool = True
    icc: float | None = None

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        check_figure("sample bytes", self.sample_bytes)
        check_figure("spread", self.spread, may_be_zero=True)
        if self.shards is not None:
            check_count("shards", self.shards)

    @property
    def total_bytes(self) -> float:
        """Stored bytes of all samples."""
        return self.samples * self.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """One node; all are alike. cores: usable ones. ram_bytes: of memory. nvme_bytes: the cache's
    limit, 0 without a cache; nvme_bytes_per_s: of its disk, read or written.
    nic_bytes_per_s: of its network, in each direction at once."""

    cores: float
    ram_bytes: float
    nvme_bytes: float
    nvme_bytes_per_s: float
    nic_bytes_per_s: float

    def __post_init__(self) -> None:
        check_figure("cores", self.cores)
        check_figure("RAM", self.ram_bytes, unit=" bytes")
        check_figure("NVMe", self.nvme_bytes, may_be_zero=True, unit=" bytes")
        check_figure("NVMe bandwidth", self.nvme_bytes_per_s, unit=" bytes/s")
        check_figure("NIC", self.nic_bytes_per_s, unit=" bytes/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """Where the data lie. bytes_per_s, requests_per_s: for all nodes together. latency_s: mean time
    to the first byte; tail: the slowest of 10,000 requests, hedged, over the mean one.
    stream_bytes_per_s: of one connection. price_per_1000: of requests, in any currency."""

    bytes_per_s: float
    latency_s: float
    stream_bytes_per_s: float
    requests_per_s: float
    tail: float = 4.0
    price_per_1000: float | None = None

    def __post_init__(self) -> None:
        check_figure("store bandwidth", self.bytes_per_s, unit=" bytes/s")
        check_figure("store latency", self.latency_s, may_be_zero=True, unit=" s")
        check_figure("stream bandwidth", self.stream_bytes_per_s, unit=" bytes/s")
        check_figure("store requests", self.requests_per_s, unit="/s")
        check_figure("tail", self.tail)
        if self.price_per_1000 is not None:
            check_figure("price per 1,000 requests", self.price_per_1000, may_be_zero=True)

    def request_s(self, size_bytes: float) -> float:
        """Mean seconds of a request for so many bytes, E[T]."""
        return self.latency_s + size_bytes / self.stream_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """The training job. gpus: of a node, with a rank each. global_batch: of all ranks.
    samples_per_s: that one GPU takes when it never waits. cpu_s_per_1000: that decoding and
    augmenting a thousand samples take of the cores (0: the GPU does it, or there is nothing to
    decode). peers: nodes ask one another before the store; tls: and encrypt that. moved: the caches
    are filled, and so much of what each node reads, 0 to 1, lies on other nodes, as after a change
    of nodes; None: the caches are empty. reshuffle: the loader's, the share of the shards that
    take another place in each epoch."""

    nodes: int
    gpus: int
    global_batch: int
    samples_per_s: float
    epochs: int = 1
    cpu_s_per_1000: float = 0.0
    peers: bool = False
    tls: bool = False
    moved: float | None = None
    reshuffle: float = 0.0

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("GPUs of a node", self.gpus)
        check_count("global batch", self.global_batch)
        check_count("epochs", self.epochs)
        check_figure("samples/s of a GPU", self.samples_per_s)
        check_figure("CPU seconds per 1,000", self.cpu_s_per_1000, may_be_zero=True)
        for what, share in (("moved", self.moved or 0.0), ("reshuffle", self.reshuffle)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{what}: got {share:g}, wanted a share from 0 to 1.")
        if self.global_batch < self.ranks:
            raise ConfigError(
                f"global batch: got {self.global_batch}, {self.ranks - self.global_batch} fewer "
                f"than the {self.ranks} GPUs of {self.nodes} nodes: each rank takes a sample at "
                "least. Raise the batch, or use fewer GPUs."
            )

    @property
    def ranks(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus

    @property
    def step_s(self) -> float:
        """Seconds of a step that waits for nothing: the rank with the largest slice's."""
        return -(-self.global_batch // self.ranks) / self.samples_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """A job on a cluster. store: None where every node has the data on its own disk."""

    data: DataFigures
    node: NodeFigures
    store: StoreFigures | None
    job: JobFigures

    def __post_init__(self) -> None:
        if self.data.samples < self.job.global_batch:
            raise ConfigError(
                f"global batch: got {self.job.global_batch} of {self.data.samples} samples: an "
                f"epoch has no whole batch, {self.job.global_batch - self.data.samples} are "
                "missing. Lower the batch, or use fewer GPUs."
            )

    @property
    def link_bytes_per_s(self) -> float:
        """Payload that a node's network carries, in each direction."""
        return NIC_PAYLOAD * self.node.nic_bytes_per_s

    @property
    def steps(self) -> int:
        """Whole global batches of an epoch; what is left of it is dropped."""
        return self.data.samples // self.job.global_batch


def au_percent(compute_s: Sequence[float], elapsed_s: float) -> float:
    """Compute accelerator utilisation (AU) in per cent, 0 to 100: the share of computing time.

    compute_s: measured seconds of the compute of each step but the first; elapsed_s: seconds from
    the end of the first step to the end of the last. Returns 0.0 without a step.

    The definition is DLIO's (github.com/argonne-lcf/dlio_benchmark, utils/statscounter.py,
    `compute_metrics_train`, with metric_exclude_start_steps=1 and metric_exclude_end_steps=0):
    AU = 100 * sum(compute[1:]) / (elapsed - (load[0] + compute[0])). Compute is the measured length
    of a step, not the requested one, so a machine too busy to wake a step in time doesn't count as
    waiting. DLIO's elapsed also includes the end of an epoch, and DLIO takes the mean over epochs
    and ranks.

    Raises ConfigError if the steps are longer than elapsed_s, or negative: then they weren't read
    from one clock, or one of the two includes the first step.
    """
    computed_s = sum(compute_s)
    if computed_s == 0:
        return 0.0
    # Sums of differences of one clock differ from the difference of its ends by rounding only.
    if min(compute_s) < 0 or computed_s > elapsed_s * (1 + 1e-9):
        raise ConfigError(
            f"{computed_s:.6f} s of steps in {elapsed_s:.6f} s can't be: every step must be at "
            "least 0 s and all of them at most the elapsed time. Read both from one clock, and "
            "leave the first step out of both."
        )
    return min(100.0, 100 * computed_s / elapsed_s)
