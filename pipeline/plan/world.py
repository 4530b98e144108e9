"""Finds out which rank of how many this process is.

The only module that asks the environment about the job (the operating system's limits are
`cache.base.limits`). A running process group knows best; before there is one, the launcher's
variables say the same. What a job scheduler sets for a whole job isn't believed: under Slurm a
batch script has SLURM_PROCID=0 and SLURM_NTASKS of 8 though it runs once, and a loader that took
itself for rank 0 of 8 would skip most of the data.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REMEDY = "Correct or unset it, or pass world=World(rank, size)."
# Some trainers' launchers (Lightning's) tell their children all but the rank.
_LATER = (
    "A launcher that leaves the rank to the process group must have started that first: iterate "
    "the loader once it stands (inside of the trainer's fit). Else set"
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class World:
    """One process among all that train together.

    rank: in [0, size). local_rank, local_size: the same among the processes of this node; where
    nobody told, 0 of 1. Raises PlanError for values that contradict one another.
    """

    rank: int
    size: int
    _: KW_ONLY
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "size", "local_rank", "local_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"World: {name} must be a whole number, got {value!r}.")
        for what, rank, size in (
            ("", self.rank, self.size),
            ("local_", self.local_rank, self.local_size),
        ):
            if size < 1:
                raise PlanError(f"World: {what}size must be 1 or more, got {size}.")
            if not 0 <= rank < size:
                raise PlanError(f"World: {what}rank must be in [0, {size}), got {rank}.")
        if self.local_size > self.size:
            raise PlanError(
                f"World: local_size {self.local_size} is more than size {self.size}: a node can't "
                "hold more processes than the job. Pass the job's size, then the node's."
            )

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world of this process, from what is already there; nothing is initialised.

        Asked in this order: torch's default process group, if torch is loaded and the group stands
        (its rank and size; the launcher tells the place on the node); torchrun; Open MPI; MPICH and
        Intel MPI; a Slurm step of several tasks; any other PMI. Without all of them World(0, 1).
        environ: instead of os.environ. Raises PlanError naming the variable that is missing, isn't
        a number or contradicts another; a missing rank may come with the process group.
        """
        return cls.find(environ) or cls(0, 1)

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> World | None:
        """The world as `detect` finds it; None where neither a group nor a launcher names one."""
        environ = os.environ if environ is None else environ
        group = _process_group()
        if group is None:
            return next((w for launcher in _LAUNCHERS if (w := launcher(environ))), None)
        for launcher in _LAUNCHERS:
            try:
                world = launcher(environ)
            except PlanError:
                continue  # the group has what matters; the variables may be leftovers
            if world is not None and (world.rank, world.size) == group:
                return world
        return _with_place(environ, *group)

    def share(self, count: int) -> int:
        """How many of `count` slots fall to this rank; the ranks' shares differ by at most one."""
        return (self.rank + 1) * count // self.size - self.rank * count // self.size

    def threads(self, cores: int) -> int:
        """This rank's share of its node's cores, at least 1."""
        end, begin = (self.local_rank + 1) * cores, self.local_rank * cores
        return max(1, end // self.local_size - begin // self.local_size)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """The place of this process on its node, also where a launcher says no more than that.

    environ: instead of os.environ.
    """
    environ = os.environ if environ is None else environ
    try:
        world = World.find(environ)
    except PlanError:
        world = None
    if world is not None and world.local_size > 1:
        return world.local_rank
    alone = environ.get("LOCAL_RANK", "").strip()
    return int(alone) if alone.isdecimal() else 0


def _process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def peer_token(environ: Mapping[str, str] | None = None) -> str | None:
    """The secret that the nodes of a job share, where the environment holds it: Peers' own text.

    environ: instead of os.environ.
    """
    return (os.environ if environ is None else environ).get("PENSTOCK_PEER_TOKEN") or None


def _with_place(environ: Mapping[str, str], rank: int, size: int) -> World:
    """A group's rank, with its place on the node where a launcher told that and no rank.

    Lightning's gives LOCAL_RANK and NODE_RANK; how many are on a node follows from them on every
    node but the first, and there if the job has one node only. Else only what is sure.
    """
    names = ("LOCAL_RANK", "WORLD_SIZE")
    if "RANK" in environ or any(not environ.get(name, "").strip().isdecimal() for name in names):
        return World(rank, size)
    local_rank, node = int(environ["LOCAL_RANK"]), environ.get("NODE_RANK", "").strip()
    if int(environ["WORLD_SIZE"]) != size or local_rank > rank:
        return World(rank, size)
    local_size = local_rank + 1
    if node.isdecimal() and int(node) and (rank - local_rank) % int(node) == 0:
        local_size = max(local_size, (rank - local_rank) // int(node))
    elif node == "0" and environ.get("MASTER_ADDR", "") in _LOOPBACK:
        local_size = size
    return World(rank, size, local_rank=local_rank, local_size=min(local_size, size))


def _torchrun(environ: Mapping[str, str]) -> World | None:
    return _from_names(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    names = (f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _from_names(environ, *names)


def _hydra(environ: Mapping[str, str]) -> World | None:
    """MPICH's and Intel MPI's mpiexec, known by the local rank that they add to PMI's variables."""
    return _pmi(environ) if "MPI_LOCALRANKID" in environ else None


def _pmi(environ: Mapping[str, str]) -> World | None:
    return _from_names(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(environ: Mapping[str, str]) -> World | None:
    """A task of `srun`: only srun sets SLURM_STEP_ID; the other variables a batch script has too.

    The step's own number of tasks goes before the job's: an interactive shell is a step of one.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size_name = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_name is None or _number(environ, size_name) <= 1:
        return None
    world = _from_names(environ, "SLURM_PROCID", size_name, "SLURM_LOCALID", None)
    if world is None or "SLURM_LOCALID" not in environ:
        return world
    name, local_size = _slurm_local_size(environ, world)
    return _checked(
        (name, "SLURM_LOCALID"),
        lambda: World(world.rank, world.size, local_rank=world.local_rank, local_size=local_size),
    )


def _slurm_local_size(environ: Mapping[str, str], world: World) -> tuple[str, int]:
    """Tasks on this node and the variable that says so: "4(x2),3" is 4, 4 and 3 on three nodes."""
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        if "SLURM_NTASKS_PER_NODE" not in environ:
            return "SLURM_LOCALID", world.local_size
        # What was asked for at most; a small step has fewer.
        return "SLURM_NTASKS_PER_NODE", min(_number(environ, "SLURM_NTASKS_PER_NODE"), world.size)
    counts: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part.strip(), re.ASCII)
        if match is None:
            raise PlanError(f'{name}: got {environ[name]!r}, wanted a list as "4(x2),3". {_REMEDY}')
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    if node >= len(counts):
        raise PlanError(
            f"SLURM_NODEID: got {node}, but {name}={environ[name]!r} has {len(counts)} nodes. "
            f"{_REMEDY}"
        )
    return name, counts[node]


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], World | None], ...] = (
    # Those that run inside others go first: torchrun and mpirun are started by srun, too.
    _torchrun,
    _open_mpi,
    _hydra,
    _slurm,
    _pmi,
)


def _from_names(
    environ: Mapping[str, str],
    rank: str,
    size: str,
    local_rank: str | None,
    local_size: str | None,
) -> World | None:
    """The world that four variables tell; None if neither of the first two is set.

    A launcher that tells only the local rank leaves the local size open: it is at least one more.
    """
    if rank not in environ and size not in environ:
        return None
    for name, other in ((rank, size), (size, rank)):
        if name not in environ:
            remedy = f"{_LATER} {rank}, or pass world=World(rank, size)."
            raise PlanError(
                f"{name}: not set, though {other}={environ[other]!r} is. "
                f"{remedy if name == rank else _REMEDY}"
            )
    values = {"rank": _number(environ, rank), "size": _number(environ, size)}
    names = [rank, size]
    local: dict[str, int] = {}
    if local_rank is not None and local_rank in environ:
        names.append(local_rank)
        local["local_rank"] = _number(environ, local_rank)
        local["local_size"] = local["local_rank"] + 1
        if local_size is not None and local_size in environ:
            names.append(local_size)
            local["local_size"] = _number(environ, local_size)
    return _checked(tuple(names), lambda: World(values["rank"], values["size"], **local))


def _checked(names: tuple[str, ...], make: Callable[[], World]) -> World:
    try:
        return make()
    except PlanError as error:
        raise PlanError(f"{', '.join(names)}: {error} {_REMEDY}") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise PlanError(f"{name}: got {environ[name]!r}, wanted a whole number. {_REMEDY}")
    return int(text)


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if name in environ), None)
