"""The set-ups of `benchmarks.sizing`: the limited resource, and the figures for the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pack of samples of random bytes."""

    samples: int = 4_096
    sample_bytes: int = 50_000
    shard_bytes: str = "2MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """One set-up.

    batch: of all ranks. store: (latency in seconds, bytes/s), None for local data. step_s: of a
    step. decode: seconds that decoding a sample sleeps, in so many processes per rank. room: size
    of a node's cache, relative to the data. link, disk: bits/s and bytes/s if these are throttled.
    nodes, gpus: of the job, and ranks per node. moved: nodes fill their caches and change places
    before the compared epoch. reshuffle: the loader's. told: further options of the plan. epoch:
    the kind of epoch that is compared.
    """

    name: str
    epoch: str
    shape: Shape = field(default_factory=Shape)
    batch: int = 64
    store: tuple[float, float] | None = (0.005, 1000 * MB)
    step_s: float = 0.02
    decode: float = 0.0
    processes: int = 2
    room: float = 4.0
    link: float | None = None
    disk: float | None = None
    nodes: int = 1
    gpus: int = 1
    moved: bool = False
    reshuffle: float = 0.0
    told: tuple[str, ...] = ()

    @property
    def is_linked(self) -> bool:
        """True if it needs hosts of its own, for links or several ranks."""
        return self.link is not None or self.nodes * self.gpus > 1

    @property
    def epochs(self) -> int:
        """Epochs to run, including the compared one; a small cache settles in two."""
        return 1 if self.epoch == "first" else 3


SET_UPS = (
    SetUp(name="model", epoch="later", step_s=0.1),
    SetUp(name="remote", epoch="first", store=(0.005, 12.5 * MB)),
    SetUp(name="small cache", epoch="later", store=(0.005, 10 * MB), room=0.5),
    SetUp(name="latency", epoch="first", store=(0.4, 1000 * MB)),
    SetUp(name="decode", epoch="later", decode=0.008),
    SetUp(name="disk", epoch="first", store=None, disk=25 * MB),
    SetUp(name="nic", epoch="first", link=50e6),
    SetUp(name="peer", epoch="first", link=25e6, store=(0.005, 2 * MB), nodes=2, moved=True),
)
