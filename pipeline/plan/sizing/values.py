"""What a sizing is computed from: the data, a node, the store, the training job.

All are figures of one machine or one job, in bytes, seconds and samples; nothing here looks
anything up.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cache.errors import ConfigError
from penstock.pipeline.plan.sizing.checks import check_count, check_figure
from penstock.pipeline.plan.sizing.costs import NIC_PAYLOAD


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
class Setup:
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
