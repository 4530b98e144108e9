"""Detect this process's rank and the number of ranks of its job.

This is the only module that reads the job's environment variables (`cache.base.resources` reads the
operating system's limits). An initialised process group has precedence; before it exists, the
launcher's variables have the same values. Variables that a scheduler sets for a whole job are
ignored: under Slurm a batch script has SLURM_PROCID=0 and SLURM_NTASKS=8 although it runs once, and
a loader that used them would read an eighth of the data.

A torch DeviceMesh describes replicas of a model, each of several processes. This module doesn't
import torch for it: it reads the public attributes of a mesh that the caller made.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    _Launcher = Callable[[Mapping[str, str]], "World | None"]

_REMEDY = "Correct or unset it, or pass world=World(rank, size)."
# Some trainers' launchers (Lightning's) set all variables but the rank.
_LATER = (
    "If the launcher sets no rank, it comes from the process group: iterate the loader after the "
    "group is initialised (inside of the trainer's fit). Otherwise set"
)
_POD_INDEX = "JOB_COMPLETION_INDEX"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class World:
    """A process's place in its job, which determines the share of the data that it reads.

    rank: in [0, size): processes of the same rank get the same batches. local_rank, local_size:
    this process's number on its node and the number of processes there; 0 and 1 if unknown.
    place: (number, count) of this process among all processes of the job, if several processes have
    one rank (a model that is split over them) or ranks are numbered in another order; None: (rank,
    size). node: ranks [first, end) that have a process on this node; None: consecutive ranks, as
    usual, or unknown. Raises PlanError for values that contradict one another.
    """

    rank: int
    size: int
    _: KW_ONLY
    local_rank: int = 0
    local_size: int = 1
    place: tuple[int, int] | None = None
    node: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_pair("place=", self.place, wanted="(process, processes)")
        _check_pair("node=", self.node, wanted="ranks (first, end) that are on it")
        process, processes = self.place or (self.rank, self.size)
        _check_rank("World: ", self.rank, self.size)
        _check_rank("World: local_", self.local_rank, self.local_size)
        _check_rank("World: process ", process, processes)
        if self.size > processes:
            raise PlanError(
                f"World: size {self.size} is more than the {processes} processes of place="
                f"{self.place}: each rank is at least one process."
            )
        if self.local_size > processes:
            raise PlanError(
                f"World: local_size {self.local_size} is more than size {processes}: a node can't "
                "hold more processes than the job. Pass the job's size, then the node's."
            )
        first, end = self.node or (self.rank, self.rank + 1)
        if not 0 <= first <= self.rank < end <= self.size:
            raise PlanError(
                f"World: node={self.node} must be ranks [first, end) of {self.size}, with rank "
                f"{self.rank} among them."
            )

    @property
    def process(self) -> int:
        """This process's number among all of the job."""
        return self.rank if self.place is None else self.place[0]

    @property
    def processes(self) -> int:
        """The number of processes of the job: that of its ranks, unless replicas have several."""
        return self.size if self.place is None else self.place[1]

    @property
    def nodes(self) -> int:
        """The number of nodes of the job, if all are like this one."""
        return -(-self.processes // self.local_size)

    @property
    def is_first_on_node(self) -> bool:
        """True for the first process of a node, which reports for it."""
        return self.local_rank == 0

    @property
    def label(self) -> str:
        """The name of this process in errors: "rank 3", or "rank 3 (process 13)"."""
        process = "" if self.process == self.rank else f" (process {self.process})"
        return f"rank {self.rank}{process}"

    @property
    def file_label(self) -> str:
        """The name of this process in file names, with numbers of a fixed width."""
        process = "" if self.process == self.rank else f"-process-{self.process:05d}"
        return f"rank-{self.rank:05d}{process}"

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return the world of this process; initialise nothing.

        Sources, in this order: torch's default process group if it is initialised (rank and size;
        the local rank comes from the launcher); Horovod if it is initialised; torchrun; Horovod's
        launcher; Open MPI; MPICH and Intel MPI; a Slurm step of several tasks; any other PMI.
        Returns World(0, 1) if there is none of them.
        environ: replaces os.environ. Raises PlanError for a variable that is missing, isn't a
        number or contradicts another one, and in a pod of a Kubernetes Indexed Job without ranks. A
        rank that is missing now may come with the process group.
        """
        return cls.find(environ) or cls(0, 1)

    @classmethod
    def from_mesh(cls, mesh: Any, environ: Mapping[str, str] | None = None) -> World:
        """Return the world of a job whose model is split: each replica gets its own batches.

        mesh: the dimension of a torch DeviceMesh over the replicas: mesh["dp"]; for sharded
        replicas mesh["dp_replicate", "dp_shard"]._flatten("dp"). Raises PlanError for any other.
        """
        return cls.detect(environ).in_mesh(mesh)

    def in_mesh(self, mesh: Any) -> World:
        """Return this process's world with its replica of a mesh as rank, as in `from_mesh`."""
        replicas = replicas_of(mesh, self.rank)
        first = self.rank - self.local_rank
        return replace(
            self.with_replicas(replicas.index(self.rank), len(replicas)),
            place=(self.rank, self.size),  # even if each process is a replica
            node=node_of(replicas, self.rank, range(first, first + self.local_size)),
        )

    def with_replicas(self, rank: int, size: int) -> World:
        """Return this process's world as a member of replica `rank` of `size`.

        Raises PlanError if the job's processes can't form `size` replicas.
        """
        _check_rank("data_parallel: ", rank, size)
        if self.processes % size:
            raise PlanError(
                f"data_parallel=({rank}, {size}): {self.processes} processes can't be {size} "
                f"replicas of one size. Pass a size that divides {self.processes}, or the whole "
                "place as world=World(rank, size, place=(process, processes))."
            )
        if (rank, size) == (self.rank, self.size):
            return self
        return replace(self, rank=rank, size=size, place=(self.process, self.processes), node=None)

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> World | None:
        """Return the world as `detect` does; None without a process group and a launcher."""
        environ = os.environ if environ is None else environ
        group = process_group()
        if group is None:
            launchers = (lambda _: _initialised_horovod(), *_LAUNCHERS.values())
            found = next((w for detect in launchers if (w := detect(environ))), None)
            if found is None and (pod := pod_index(environ)) is not None:
                # A warning would be lost in the logs of many pods, each of which would train on all
                # data.
                raise PlanError(
                    f"{_POD_INDEX}={pod}: this is a pod of an Indexed Job, and no variable has the "
                    "number of processes that train together: the index is the number of a pod, "
                    "not a rank. Start the training with torchrun --nnodes=PODS "
                    "--node-rank=$JOB_COMPLETION_INDEX, or initialise the process group before the "
                    "loader; pass world=World(0, 1) if each pod is a job of its own, else "
                    "world=World(rank, size)."
                )
            return found
        for detect in _LAUNCHERS.values():
            try:
                world = detect(environ)
            except PlanError:
                continue  # stale variables: the group has the rank and the size
            if world is not None and (world.rank, world.size) == group:
                return world
        return _with_place(environ, *group)

    def share(self, count: int, bins: int = 1) -> int:
        """Return how many of `count` slots this rank reads. The ranks' shares differ by at most
        one, unless a batch has `bins` that the ranks don't divide."""
        low, high = rank_slots(self, count, bins)
        return high - low

    def threads(self, cores: int) -> int:
        """Return this rank's share of its node's cores, at least 1."""
        end, begin = (self.local_rank + 1) * cores, self.local_rank * cores
        return max(1, end // self.local_size - begin // self.local_size)


def first_slot(count: int, rank: int, world: int, bins: int = 1) -> int:
    """Return the first slot of a rank in a global batch of `count`; `count` for rank `world`.

    bins: equal parts, by number of samples, that the batch was cut into. If there are more bins
    than ranks, each rank reads complete bins; if there are fewer, several ranks share one.
    """
    if world % bins == 0 or bins % world == 0:
        return rank * count // world
    bin = rank * bins // world
    begin = bin * count // bins
    if world < bins:
        return begin
    first, end = -(-bin * world // bins), -(-(bin + 1) * world // bins)
    return begin + ((bin + 1) * count // bins - begin) * (rank - first) // (end - first)


def rank_slots(world: World, count: int, bins: int = 1) -> tuple[int, int]:
    """Return the slots [low, high) of a global batch of `count` that a rank reads."""
    rank, size = world.rank, world.size
    return first_slot(count, rank, size, bins), first_slot(count, rank + 1, size, bins)


def _check_rank(what: str, rank: int, size: int) -> None:
    for name, value in (("rank", rank), ("size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise PlanError(f"{what}{name} must be a whole number, got {value!r}.")
    if size < 1:
        raise PlanError(f"{what}size must be 1 or more, got {size}.")
    if not 0 <= rank < size:
        raise PlanError(f"{what}rank must be in [0, {size}), got {rank}.")


def _check_pair(what: str, pair: object, *, wanted: str) -> None:
    if pair is not None and not (
        isinstance(pair, tuple | list) and len(pair) == 2 and all(type(n) is int for n in pair)
    ):
        raise PlanError(f"World: got {what}{pair!r}, wanted {wanted}, or None.")


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return the local rank of this process, even if the launcher sets no other variable.

    environ: replaces os.environ.
    """
    environ = os.environ if environ is None else environ
    try:
        world = World.find(environ)
    except PlanError:
        world = None
    if world is not None and world.local_size > 1:
        return world.local_rank
    text = environ.get("LOCAL_RANK", "").strip()
    return int(text) if text.isdecimal() else 0


def pod_index(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of this pod in a Kubernetes Indexed Job; None outside of one.

    It isn't a rank: a pod may run several processes, and pods of a sweep are separate jobs.
    environ: replaces os.environ.
    """
    environ = os.environ if environ is None else environ
    if not environ.get(_POD_INDEX, "").strip():
        return None
    return _number(environ, _POD_INDEX)


def _initialised_horovod() -> World | None:
    """Return the world of an initialised Horovod, whatever the launcher; None without one."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is None or not horovod.is_initialized():
        return None
    own, count = horovod.local_rank(), horovod.local_size()
    return World(horovod.rank(), horovod.size(), local_rank=own, local_size=count)


def process_group() -> tuple[int, int] | None:
    """Return the rank and size of torch's default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def peer_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the secret of the job's nodes from PENSTOCK_PEER_TOKEN; None if that isn't set.

    environ: replaces os.environ.
    """
    return (os.environ if environ is None else environ).get("PENSTOCK_PEER_TOKEN") or None


def _with_place(environ: Mapping[str, str], rank: int, size: int) -> World:
    """Return a group's world with the local rank of a launcher that sets no rank.

    Lightning's sets LOCAL_RANK and NODE_RANK. The processes of a node follow from these on every
    node but the first, and on the first if it is the only one; otherwise local_size is a minimum.
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


_MPI_LOCAL_RANK = "MPI_LOCALRANKID"


def _named(*names: str) -> _Launcher:
    """Return the launcher that sets these variables, as for `_from_names`."""
    return lambda environ: _from_names(environ, *names)


_pmi = _named("PMI_RANK", "PMI_SIZE", _MPI_LOCAL_RANK, "MPI_LOCALNRANKS")


def _slurm(environ: Mapping[str, str]) -> World | None:
    """Return the world of a task of `srun`, which sets SLURM_STEP_ID; a batch script has only the
    other variables.

    The step's number of tasks has precedence over the job's: an interactive shell is a step of 1.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size_name = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_name is None or _number(environ, size_name) <= 1:
        return None
    world = _from_names(environ, "SLURM_PROCID", size_name, "SLURM_LOCALID")
    if world is None or "SLURM_LOCALID" not in environ:
        return world
    (name, local_size), node = _slurm_local_size(environ, world), _slurm_node(environ, world)
    names = name, "SLURM_LOCALID"
    return _checked(names, lambda: replace(world, local_size=local_size, node=node))


def _slurm_node(environ: Mapping[str, str], world: World) -> tuple[int, int] | None:
    """Return (rank, rank + 1) if the ranks of the node aren't consecutive (--distribution=cyclic)
    and None if they are, as usual."""
    tasks = environ.get("SLURM_GTIDS", "").split(",")
    if not all(task.isdecimal() for task in tasks):
        return None
    ranks = sorted(map(int, tasks))
    is_run = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    if world.rank not in ranks or (is_run and ranks[0] == world.rank - world.local_rank):
        return None  # the variable is another step's, or the ranks are consecutive
    return world.rank, world.rank + 1


def _slurm_local_size(environ: Mapping[str, str], world: World) -> tuple[str, int]:
    """Return the name of the variable that lists the nodes' tasks, and the number on this node.

    "4(x2),3" stands for 4, 4 and 3 tasks on three nodes.
    """
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        if "SLURM_NTASKS_PER_NODE" not in environ:
            return "SLURM_LOCALID", world.local_size
        # The maximum that the user requested; a small step has fewer.
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


_PARTS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_LAUNCHERS: dict[str, _Launcher] = {
    # Inner launchers come first: srun may have started torchrun or mpirun.
    "torchrun": _named("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Horovod": _named(*(f"HOROVOD_{part}" for part in _PARTS)),
    "Open MPI": _named(*(f"OMPI_COMM_WORLD_{part}" for part in _PARTS)),
    # The mpiexec of MPICH or Intel MPI adds the local rank to PMI's variables.
    "MPICH or Intel MPI": lambda environ: _pmi(environ) if _MPI_LOCAL_RANK in environ else None,
    "srun": _slurm,
    "PMI": _pmi,
}


def launcher(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the name of the launcher whose variables describe this process; None without one.

    environ: replaces os.environ. Raises PlanError for variables that contradict one another.
    """
    environ = os.environ if environ is None else environ
    return next((name for name, world in _LAUNCHERS.items() if world(environ)), None)


def _from_names(environ: Mapping[str, str], *names: str) -> World | None:
    """Return the world that up to four variables describe: rank, size, local rank and local size.
    None if neither of the first two is set.

    A missing local size is assumed to be its minimum, the local rank + 1.
    """
    rank, size = names[:2]
    if rank not in environ and size not in environ:
        return None
    for name, other in ((rank, size), (size, rank)):
        if name not in environ:
            remedy = f"{_LATER} {rank}, or pass world=World(rank, size)."
            raise PlanError(
                f"{name}: not set, though {other}={environ[other]!r} is. "
                f"{remedy if name == rank else _REMEDY}"
            )
    known = [*itertools.takewhile(environ.__contains__, names)]
    number, ranks, *local = (_number(environ, name) for name in known)
    own = local[0] if local else 0
    count = local[1] if len(local) > 1 else own + 1
    return _checked(known, lambda: World(number, ranks, local_rank=own, local_size=count))


def _checked(names: Sequence[str], make: Callable[[], World]) -> World:
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


def replicas_of(mesh: Any, process: int) -> list[int]:
    """Return one process of each replica, those with this process's position in it, in the
    replicas' order.

    Raises PlanError for a mesh of several dimensions or without names, and for one that doesn't
    contain this process.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "mesh") or not hasattr(mesh, "ndim"):
        raise PlanError(
            f"World.from_mesh: got {type(mesh).__name__}, wanted the part of a torch DeviceMesh "
            'over the replicas: World.from_mesh(mesh["dp"]).'
        )
    if not names:
        raise PlanError(
            "World.from_mesh: the mesh's dimensions have no names, so it isn't known which one is "
            "over replicas of the model. Make it by init_device_mesh(..., "
            'mesh_dim_names=("dp", "tp")) and pass mesh["dp"].'
        )
    if mesh.ndim != 1:
        listed = ", ".join(f"{name!r}" for name in names)
        raise PlanError(
            f"World.from_mesh: got a mesh of {mesh.ndim} dimensions ({listed}), wanted the one "
            f"over replicas that get batches of their own: mesh[{names[0]!r}]. For sharded "
            'replicas (two dimensions) pass mesh["a", "b"]._flatten("dp").'
        )
    replicas = [int(number) for number in mesh.mesh.flatten().tolist()]
    if process not in replicas:
        raise PlanError(
            f"World.from_mesh: process {process} isn't among the mesh's {len(replicas)} "
            "processes. Make the mesh over all processes of the job, on each of them."
        )
    return replicas


def node_of(replicas: list[int], process: int, node: range) -> tuple[int, int]:
    """Return the ranks [first, end) that have a process on this node; only this rank if unknown.

    replicas: from `replicas_of`; their processes have one stride, since a mesh numbers processes by
    dimension. node: the processes of this node, if they are consecutive.
    """
    rank = replicas.index(process)
    only_this = rank, rank + 1
    size = len(replicas)
    stride = replicas[1] - replicas[0] if size > 1 else 1
    is_even = all(b - a == stride for a, b in itertools.pairwise(replicas))
    if stride < 1 or not is_even or (process // stride) % size != rank:
        return only_this
    ranks = sorted({number // stride % size for number in node})
    is_run = ranks == list(range(ranks[0], ranks[-1] + 1))
    is_known = node.start >= 0 and is_run and rank in ranks
    return (ranks[0], ranks[-1] + 1) if is_known else only_this
