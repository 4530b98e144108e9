"""Describe the inputs of a sizing: the data, a node, the store, the job and unit costs.

All figures are of one machine or one job, in bytes, seconds and samples. The CPU costs of moving
bytes were measured; docs/benchmarks.md names the machines. Faster cores need fewer CPU-seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.cache.base import FetchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 1e24  # a yottabyte: no figure is larger


def check_count(what: str, value: object, *, least: int = 1) -> None:
    """Raise ConfigError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}: got {value!r}, wanted a whole number from {least} on.")


def check_figure(what: str, value: float, *, may_be_zero: bool = False, unit: str = "") -> None:
    """Raise ConfigError unless the value is a finite number above 0 (or 0, if it may be)."""
    if math.isfinite(value) and value > _MOST:
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted at most {_MOST:g}.")
    if not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted {least}.")


FETCH_S_PER_GB, FETCH_S_PER_REQUEST = 0.63, 0.12e-3
"""CPU cost of a store's client: 0.63, 0.75 and 2.4 s a GB in ranges of 8 MiB, 1 MiB and 64 KiB."""

READ_S_PER_GB = 0.35
"""CPU cost of reading and checking samples that are on the local disk or in memory."""

PEER_S_PER_GB = {False: (0.47, 0.24), True: (0.95, 0.69)}
"""CPU cost of 8 MiB ranges from another node's cache, of the client and of the server: over plain
HTTP, and (True) encrypted.

The client's includes checksums, its writes to disk and its bookkeeping. Encrypted, 0.70 + 0.69 were
measured without writes and bookkeeping, which take 0.25 (0.47 less 0.22 without them)."""

NIC_PAYLOAD = 1448 / 1538
"""Share of a network's bandwidth that carries payload: TCP's payload of a full Ethernet frame with
its gap and headers (40 bytes of IP and TCP, 12 of time stamps, 38 of Ethernet)."""

RAM_SHARE = 0.5
"""Share of a node's memory in which the kernel may keep cached files; the job has the rest."""

REQUEST_BYTES = FetchPolicy().range_bytes
CONNECTIONS_A_RANK = FetchPolicy().start_connections
"""Connections that a rank begins with; it adds up to half as many while they raise throughput."""

OPENERS = 16
"""Shards that a rank opens at a time, as `readers.reading.open_shards` does."""

TAIL = 4.0
"""Time of the slowest of 10,000 requests to a store, with hedging, over the mean time."""

MARGIN_SHARE = 0.002
"""Share of the cache's limit that isn't used for shards."""


def fetch_cpu_s(size_bytes: float, requests: float) -> float:
    """Return the CPU seconds to fetch bytes from a store with a number of requests."""
    return FETCH_S_PER_GB * size_bytes / 1e9 + FETCH_S_PER_REQUEST * requests


def peer_cpu_s(size_bytes: float, *, tls: bool) -> float:
    """Return the CPU seconds of both sides for bytes from peers."""
    return sum(PEER_S_PER_GB[tls]) * size_bytes / 1e9


_COUNTS = ("samples", "shards", "nodes", "gpus", "global_batch", "epochs")
_FIGURES = {  # by field: name, unit, and whether it may be 0
    "sample_bytes": ("sample bytes", "", False),
    "spread": ("spread", "", True),
    "samples_per_s": ("samples/s of a GPU", "", False),
    "cpu_s_per_1000": ("CPU seconds per 1,000", "", True),
    "cores": ("cores", "", False),
    "ram_bytes": ("RAM", " bytes", False),
    "nvme_bytes": ("NVMe", " bytes", True),
    "nvme_bytes_per_s": ("NVMe bandwidth", " bytes/s", False),
    "nic_bytes_per_s": ("NIC", " bytes/s", False),
    "store_bytes_per_s": ("store bandwidth", " bytes/s", False),
    "store_latency_s": ("store latency", " s", True),
    "stream_bytes_per_s": ("stream bandwidth", " bytes/s", False),
    "store_requests_per_s": ("store requests", "/s", False),
    "price_per_1000": ("price per 1,000 requests", "", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """All figures of a job on a cluster. Raises ConfigError for figures that can't be.

    The data. sample_bytes: mean stored size of a sample; spread: standard deviation of these sizes
    over their mean. shards: number of shards; None: a pack is still to be written. shuffled:
    samples are in random order, as `pack` writes them. icc: label correlation inside a shard, None
    if unknown. stored_bytes: of all shards; None: those of an epoch's samples. new_first,
    new_later: bytes that the first epoch, and on average each later one, reads for the first time
    in the job, over those of an epoch's samples: of a mixture, whose epoch repeats some parts and
    reaches only some of others.

    The job. gpus: GPUs of a node, with a rank each. global_batch: samples of a step over all ranks.
    samples_per_s: rate of one GPU that never waits. cpu_s_per_1000: CPU seconds to decode and
    augment 1,000 samples; 0 if the GPU does it, or nothing is decoded. peers: nodes ask one another
    before the store. tls: they encrypt that. moved: share, 0 to 1, of what each node reads that is
    in other nodes' caches, as after a change of nodes; None: the caches are empty. reshuffle: share
    of the shards that change places in each epoch, as `Order(reshuffle=)`.

    A node; all are alike. cores: usable CPU cores. ram_bytes: its memory. nvme_bytes: the cache's
    limit, 0 without a cache. nvme_bytes_per_s: bandwidth of its disk, for reads and writes
    together. nic_bytes_per_s: bandwidth of its network, in each direction at once.

    The object store. is_local: there is none, because every node has the data on its disk.
    store_bytes_per_s, store_requests_per_s: limits for all nodes together. store_latency_s: mean
    time to the first byte. stream_bytes_per_s: bandwidth of one connection. price_per_1000: price
    of 1,000 requests, in any currency.
    """

    samples: int
    sample_bytes: float
    spread: float = 0.0
    shards: int | None = None
    shuffled: bool = True
    icc: float | None = None
    stored_bytes: float | None = None
    new_first: float = 1.0
    new_later: float = 0.0
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
    cores: float
    ram_bytes: float
    nvme_bytes: float
    nvme_bytes_per_s: float
    nic_bytes_per_s: float
    is_local: bool = False
    store_bytes_per_s: float
    store_latency_s: float
    stream_bytes_per_s: float
    store_requests_per_s: float
    price_per_1000: float | None = None

    def __post_init__(self) -> None:
        for field in _COUNTS:
            if (value := getattr(self, field)) is not None:
                check_count("GPUs of a node" if field == "gpus" else field.replace("_", " "), value)
        for field, (what, unit, may_be_zero) in _FIGURES.items():
            if (value := getattr(self, field)) is not None:
                check_figure(what, value, may_be_zero=may_be_zero, unit=unit)
        for what, share in (("moved", self.moved or 0.0), ("reshuffle", self.reshuffle)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{what}: got {share:g}, wanted a share from 0 to 1.")
        if self.global_batch < self.ranks:
            raise ConfigError(
                f"global batch: got {self.global_batch}, {self.ranks - self.global_batch} fewer "
                f"than the {self.ranks} GPUs of {self.nodes} nodes: each rank needs at least one "
                "sample. Raise the batch, or use fewer GPUs."
            )
        if self.samples < self.global_batch:
            raise ConfigError(
                f"global batch: got {self.global_batch} of {self.samples} samples: an epoch is "
                f"{self.global_batch - self.samples} samples short of one full batch. Lower the "
                "batch, or use fewer GPUs."
            )

    @property
    def total_bytes(self) -> float:
        """Stored bytes of the samples of an epoch."""
        return self.samples * self.sample_bytes

    @property
    def set_bytes(self) -> float:
        """Stored bytes that the job reads at least once."""
        return self.total_bytes * (self.new_first + (self.epochs - 1) * self.new_later)

    @property
    def ranks(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.gpus

    @property
    def step_s(self) -> float:
        """Seconds of a step without waits: those of the rank with the largest part of a batch."""
        return -(-self.global_batch // self.ranks) / self.samples_per_s

    @property
    def steps(self) -> int:
        """The number of full global batches of an epoch; the remaining samples are dropped."""
        return self.samples // self.global_batch

    @property
    def link_bytes_per_s(self) -> float:
        """Payload bytes a second of a node's network, in each direction."""
        return NIC_PAYLOAD * self.nic_bytes_per_s

    def request_s(self, size_bytes: float) -> float:
        """Return E[T], the mean seconds of a request to the store for `size_bytes`."""
        return self.store_latency_s + size_bytes / self.stream_bytes_per_s


def au_percent(compute_s: Sequence[float], elapsed_s: float) -> float:
    """Return the accelerator utilisation (AU) in per cent, 0 to 100: the share of computing time.

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
            f"AU: got {computed_s:.6f} s of steps in {elapsed_s:.6f} s, wanted steps of 0 s or "
            "more that sum up to the elapsed time at most. Read both from one clock, and leave "
            "the first step out of both."
        )
    return min(100.0, 100 * computed_s / elapsed_s)
