"""The world that a torch DeviceMesh describes: replicas of a model, each of several processes.

No torch is loaded: a mesh is there already, and asked by its public names.
"""

from __future__ import annotations

import itertools
from typing import Any

from penstock.cache.errors import PlanError


def replicas_of(mesh: Any, process: int) -> list[int]:
    """The processes that are at this one's place in each replica, in the replicas' order.

    Raises PlanError for a mesh of other dimensions or without names, and for one that this process
    isn't in.
    """
    _check(mesh)
    replicas = [int(one) for one in mesh.mesh.flatten().tolist()]
    if process not in replicas:
        raise PlanError(
            f"World.from_mesh: process {process} isn't among the mesh's {len(replicas)} "
            "processes. Make the mesh over all processes of the job, on each of them."
        )
    return replicas


def _check(mesh: Any) -> None:
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "mesh") or not hasattr(mesh, "ndim"):
        raise PlanError(
            f"World.from_mesh: got {type(mesh).__name__}, wanted the part of a torch DeviceMesh "
            'over the replicas: World.from_mesh(mesh["dp"]).'
        )
    if not names:
        raise PlanError(
            "World.from_mesh: the mesh's dimensions have no names, so nobody can tell which are "
            'replicas of the model. Make it by init_device_mesh(..., mesh_dim_names=("dp", "tp")) '
            'and pass mesh["dp"].'
        )
    if mesh.ndim != 1:
        listed = ", ".join(f"{name!r}" for name in names)
        raise PlanError(
            f"World.from_mesh: got a mesh of {mesh.ndim} dimensions ({listed}), wanted the one "
            f"over replicas that get batches of their own: mesh[{names[0]!r}]. Where several are "
            'that (sharded replicas), pass mesh["a", "b"]._flatten("dp").'
        )


def node_of(replicas: list[int], process: int, node: range) -> tuple[int, int]:
    """Ranks [first, end) that have a process on this node; this rank alone where that isn't sure.

    replicas: as `replicas_of`. Processes are numbered by the mesh's dimensions, so these are one
    stride apart, and all else follows. node: the processes of this node, if they are in a row.
    """
    rank = replicas.index(process)
    alone = rank, rank + 1
    size = len(replicas)
    stride = replicas[1] - replicas[0] if size > 1 else 1
    is_even = all(b - a == stride for a, b in itertools.pairwise(replicas))
    if stride < 1 or not is_even or (process // stride) % size != rank:
        return alone
    ranks = sorted({one // stride % size for one in node})
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    return (ranks[0], ranks[-1] + 1) if node.start >= 0 and in_a_row and rank in ranks else alone
