"""The doctor judges what this process may use: cores, threads, memory, files, its world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.check import Check, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.machine import MachineFacts

# Batches of torch's workers pass through /dev/shm: 2 x 4 of 256 float32 images of 224 x 224 are
# 1.2 GB. Docker's default is 64 MiB.
SMALL_SHM_BYTES = 2**30
# Workers, their pipes and shared tensors, and a folder's files take some hundred.
FEW_OPEN_FILES = 1024


def limit_checks(facts: MachineFacts) -> Iterator[Check]:
    """Judge what the system and the launcher give this process."""
    yield _cores(facts)
    yield _threads(facts)
    yield _shm(facts)
    yield _open_files(facts)
    yield _world(facts)


def _cores(facts: MachineFacts) -> Check:
    found = f"{facts.usable} usable of {facts.cpus}"
    if facts.usable >= facts.cpus:
        return Check(name="cores", status="ok", found=found)
    limits = [f"CPU affinity {facts.affinity}"] if facts.affinity < facts.cpus else []
    limits += ["the control group's CPU quota"] if facts.usable < facts.affinity else []
    found += f" ({' and '.join(limits)})"
    if facts.usable > 1:
        return Check(name="cores", status="ok", found=found)
    return Check(
        name="cores",
        status="warn",
        found=found,
        remedy="Ask the scheduler for more cores per task: decoding and training share this one.",
    )


def _threads(facts: MachineFacts) -> Check:
    if facts.torch_threads is None:
        return Check(
            name="threads", status="warn", found="unknown without torch", remedy="Install torch."
        )
    local = 1 if isinstance(facts.world, str) else facts.world.local_size
    ranks = local if local > 1 else max(1, len(facts.gpus))
    total = ranks * facts.torch_threads
    found = (
        f"{count(ranks, 'rank')} x {facts.torch_threads} of torch = {total}, on "
        f"{count(facts.usable, 'core')}"
    )
    if facts.omp_threads is not None:
        found += f" (OMP_NUM_THREADS={facts.omp_threads})"
    if total <= facts.usable:
        return Check(name="threads", status="ok", found=found)
    return Check(
        name="threads",
        status="warn",
        found=found,
        remedy=f"Set OMP_NUM_THREADS={max(1, facts.usable // ranks)} or call "
        "torch.set_num_threads: more threads than cores wait for each other.",
    )


def _shm(facts: MachineFacts) -> Check:
    if facts.shm is None:
        return Check(
            name="/dev/shm",
            status="warn",
            found="not there",
            remedy="Workers of torch datasets need it: mount it, or use num_workers=0.",
        )
    total, free = facts.shm
    found = f"{format_size(total)}, {format_size(free)} free"
    if free >= SMALL_SHM_BYTES:
        return Check(name="/dev/shm", status="ok", found=found)
    return Check(
        name="/dev/shm",
        status="warn",
        found=found,
        remedy="Workers of torch datasets pass batches through it: docker run --shm-size=8g or "
        "--ipc=host. Native datasets don't use it.",
    )


def _open_files(facts: MachineFacts) -> Check:
    soft, hard = facts.open_files
    found = f"{_limit(soft)} (up to {_limit(hard)})"
    if soft < 0 or soft >= FEW_OPEN_FILES:
        return Check(name="open files", status="ok", found=found)
    return Check(
        name="open files",
        status="warn",
        found=found,
        remedy=f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}",
    )


def _world(facts: MachineFacts) -> Check:
    world = facts.world
    if isinstance(world, str):
        return Check(
            name="world", status="fail", found=world, remedy="Correct the launcher's variables."
        )
    if facts.launcher is not None and (world.size > 1 or facts.launcher != "srun"):
        found = (
            f"rank {world.rank} of {world.size}, local rank {world.local_rank} of "
            f"{world.local_size}, from {facts.launcher}"
        )
        return Check(name="world", status="ok", found=found)
    if facts.slurm_batch:
        found = "one process: a Slurm script, not one of srun's tasks"
        return Check(name="world", status="ok", found=found)
    return Check(name="world", status="ok", found="one process, no launcher")


def _limit(count: int) -> str:
    return "no limit" if count < 0 else f"{count:,}"
