from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.cache.base import usable_cores
from penstock.pipeline.bench import machine as bench_machine
from penstock.pipeline.cli import MACHINE
from penstock.pipeline.plan import World
from penstock.readers.fieldtypes import named_verify
from tests import warm
from tests.properties import examples
from tests.watchdog import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[3]
TORCHRUN = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
HOROVOD = {
    "HOROVOD_RANK": "11",
    "HOROVOD_SIZE": "16",
    "HOROVOD_LOCAL_RANK": "3",
    "HOROVOD_LOCAL_SIZE": "8",
}
HYDRA = {"PMI_RANK": "11", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}
SBATCH = {  # what a batch script has before any srun
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
}
HERE = World(11, 16, local_rank=3, local_size=8)


@pytest.fixture(autouse=True)
def _no_group(monkeypatch):
    """Hide torch, which other tests may have loaded; only tests with a group restore it."""
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)


def group(monkeypatch, *, rank, size, available=True, initialised=True):
    monkeypatch.setitem(
        sys.modules,
        "torch.distributed",
        SimpleNamespace(
            is_available=lambda: available,
            is_initialized=lambda: initialised,
            get_rank=lambda: rank,
            get_world_size=lambda: size,
        ),
    )


# -- the value


@pytest.mark.parametrize(
    ("arguments", "local", "message"),
    [
        ((0, 0), {}, "size must be 1 or more"),
        ((2, 2), {}, r"rank must be in \[0, 2\)"),
        ((-1, 2), {}, "rank must be in"),
        ((0, 2), {"local_rank": 1}, "local_rank must be in"),
        ((0, 2), {"local_size": 0}, "local_size must be 1"),
        ((0, 2), {"local_size": 3}, "more than size"),
        ((0.0, 2), {}, "whole number"),
        ((0, True), {}, "whole number"),
        ((0, "2"), {}, "whole number"),
    ],
)
def test_a_world_checks_itself(arguments, local, message):
    with pytest.raises(PlanError, match=message):
        World(*arguments, **local)


@examples(100)
@given(size=st.integers(1, 96), count=st.integers(0, 10_000))
def test_shares_add_up_and_differ_by_at_most_one(size, count):
    shares = [World(rank, size).share(count) for rank in range(size)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@examples(100)
@given(local_size=st.integers(1, 32), cores=st.integers(1, 256))
def test_threads_of_a_node_fill_its_cores(local_size, cores):
    threads = [
        World(r, local_size, local_rank=r, local_size=local_size).threads(cores)
        for r in range(local_size)
    ]
    assert min(threads) >= 1
    assert sum(threads) == max(cores, local_size)


# -- launchers


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World(0, 1)),
        (TORCHRUN, HERE),
        (OPEN_MPI, HERE),
        (HOROVOD, HERE),
        # horovodrun by way of mpirun: from its own variables
        ({**OPEN_MPI, **HOROVOD, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, HERE),
        (HYDRA, HERE),
        (SRUN, HERE),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2)),
        # only the local rank is known: at least that many more ranks are here
        (
            {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"},
            World(2, 4, local_rank=2, local_size=3),
        ),
        # inside others: torchrun and mpirun are started by srun, one task a node
        ({**SRUN, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, HERE),
        ({**SRUN, **OPEN_MPI, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, HERE),
        ({**SRUN, **HYDRA, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, HERE),
        # srun's PMI has no local rank, Slurm does
        ({**SRUN, "PMI_RANK": "11", "PMI_SIZE": "16"}, HERE),
        # not a step of several tasks
        (SBATCH, World(0, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, World(0, 1)),
        ({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}, World(0, 1)),
    ],
)
def test_detect_reads_the_launcher(environ, world):
    assert World.detect(environ) == world


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [
        ("4(x2),3", "0", 4),
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("5,6", "1", 6),
        ("11", "0", 11),
    ],
)
def test_slurm_gives_the_tasks_of_each_node(tasks, node, local_size):
    environ = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "11",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": node,
        "SLURM_TASKS_PER_NODE": tasks,
    }
    assert World.detect(environ) == World(2, 11, local_rank=2, local_size=local_size)


def test_slurm_with_only_the_tasks_asked_for():
    environ = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    assert World.detect(environ) == World(1, 2, local_rank=1, local_size=2)
    environ["SLURM_NTASKS_PER_NODE"] = "8"
    assert World.detect(environ) == World(1, 2, local_rank=1, local_size=2)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, HOROVOD, HYDRA, SRUN])
def test_each_variable_that_is_no_number_is_named(environ):
    skipped = ("SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_TASKS_PER_NODE")
    for name in environ:
        if name not in skipped:  # the step's own values go before the job's
            for wrong in ("", "two", "-1", "1.0", "٣"):
                with pytest.raises(PlanError, match=name):
                    World.detect({**environ, name: wrong})


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "3"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "3"}, ["RANK"]),
        ({**TORCHRUN, "RANK": "16"}, ["RANK", "WORLD_SIZE"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "17"}, ["LOCAL_WORLD_SIZE"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "99"}, ["OMPI_COMM_WORLD_RANK"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK"]),
        ({**SRUN, "SLURM_PROCID": "16"}, ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]),
        ({**SRUN, "SLURM_LOCALID": "9"}, ["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]),
        ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"]),
    ],
)
def test_contradictions_name_their_variables(environ, names):
    with pytest.raises(PlanError) as caught:
        World.detect(environ)
    for name in [*names, "World(rank, size)"]:
        assert name in str(caught.value)


def test_detect_reads_the_process_environment_by_default(monkeypatch):
    for name in {*TORCHRUN, *OPEN_MPI, *HYDRA, *SRUN}:
        monkeypatch.delenv(name, raising=False)
    assert World.detect() == World(0, 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.detect() == HERE


# -- the group


def test_a_group_that_stands_goes_first(monkeypatch):
    group(monkeypatch, rank=1, size=4)
    assert World.detect({}) == World(1, 4)
    assert World.detect(TORCHRUN) == World(1, 4)  # variables of another world give no local rank
    assert World.detect({"RANK": "what"}) == World(1, 4)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, HOROVOD, HYDRA, SRUN])
def test_the_launcher_gives_the_local_rank(monkeypatch, environ):
    group(monkeypatch, rank=11, size=16)
    assert World.detect(environ) == HERE


@pytest.mark.parametrize(("available", "initialised"), [(True, False), (False, True)])
def test_a_group_that_does_not_stand_is_not_asked(monkeypatch, available, initialised):
    group(monkeypatch, rank=1, size=4, available=available, initialised=initialised)
    assert World.detect({}) == World(0, 1)


def test_torch_s_own_group_is_read():
    code = (
        "import tempfile, os, torch.distributed as d\n"
        "from penstock.pipeline.plan.world import World\n"
        "assert World.detect({}) == World(0, 1)\n"
        "store = d.HashStore()\n"
        "d.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "assert World.detect({'RANK': '2', 'WORLD_SIZE': '4'}) == World(0, 1)\n"
        "d.destroy_process_group()\n"
    )
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_detecting_imports_nothing():
    code = (
        "import sys; from penstock.pipeline.plan.world import World; World.detect(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# -- cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root folder with control groups, on 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def build(cgroup, files):
        for path, text in {"proc/self/cgroup": cgroup, **files}.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return tmp_path

    return build


V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, 16),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense"}, 16),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 0"}, 16),
        # the narrowest of the group and those above it
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "500000 100000\n",
            },
            3,
        ),
        # a path outside the container, which shows its own group at the mount
        ("0::/../../host/pod\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            "4:cpu,cpuacct:/docker/1\n3:cpuset:/\n",
            {f"{V1}/cpu.cfs_quota_us": "700000\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
            7,
        ),
        (
            "4:cpu:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
            16,
        ),
    ],
)
def test_usable_cores_are_affinity_and_quota(machine, cgroup, files, cores):
    assert usable_cores(root=machine(cgroup, files)) == cores


def test_usable_cores_are_at_least_one_and_at_most_the_affinity(tmp_path):
    assert usable_cores(root=tmp_path / "nothing") == len(os.sched_getaffinity(0))
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_every_count_of_cores_includes_the_quota(machine, monkeypatch):
    """Indexing and packing on first use as well: more threads would only be throttled."""
    pytest.importorskip("nvidia.dali")
    root = machine("0::/\n", {"sys/fs/cgroup/cpu.max": "300000 100000\n"})
    monkeypatch.setattr("penstock.cache.base.resources.ROOT", root)
    assert usable_cores() == 3
    verify: Any = named_verify()
    assert verify.keywords["threads"] == 3
    assert bench_machine()["cores"] == 3
    facts = MACHINE.only("cores").gather()
    assert (facts.affinity, facts.usable) == (16, 3)


def test_one_module_asks_how_many_cores_there_are():
    """One that asked for the affinity alone would forget the control groups."""
    asking = {
        str(path.relative_to(REPOSITORY))
        for folder in ("augment", "benchmarks", "cache", "pipeline", "readers")
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(r"sched_getaffinity|cpu_count|SC_PHYS_PAGES|meminfo", path.read_text())
    }
    assert asking == {"cache/base/resources.py"}


def test_control_groups_that_cannot_be_read_limit_nothing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert usable_cores(root=tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("pair", [5, (0,), (0, 1, 2), "01", (0.0, 1.0), (False, True), {0: 1}])
def test_places_and_nodes_are_two_numbers(pair: Any) -> None:
    with pytest.raises(PlanError, match=r"place=.*wanted"):
        World(0, 1, place=pair)
    with pytest.raises(PlanError, match=r"node=.*wanted"):
        World(0, 1, node=pair)
