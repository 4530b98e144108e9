"""The set-ups of `benchmarks.sizing`: what is held back, and what the plan is told of it."""

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
    """One set-up. batch: of all ranks. store: (seconds of latency, bytes/s), None for local data.
    step_s: of a step; decode: seconds that decoding a sample sleeps, in so many processes a rank.
    room: of a node's cache, over the data. link, disk: bits/s and bytes/s where these are
    throttled. nodes, gpus: of the job, and ranks of a node. moved: the nodes fill their caches and
    change places before what is compared. reshuffle: the loader's. told: further options of the
    plan. epoch: the kind of epoch that is compared."""

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
        """Whether it takes hosts of its own: links, or several ranks."""
        return self.link is not None or self.nodes * self.gpus > 1

    @property
    def epochs(self) -> int:
        """To run before and with the one that is compared: a small cache settles in two."""
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
