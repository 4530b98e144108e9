"""`penstock doctor`: is this machine fit to train, and what to do where it isn't.

The judgements are pure functions of `machine.Facts`, so that tests can invent machines.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.check import Check
from penstock.pipeline.cli.check import count as _count
from penstock.pipeline.cli.doctor_cache import cache_checks
from penstock.pipeline.cli.doctor_packages import package_checks
from penstock.pipeline.cli.options import StorageOption, parse_storage_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.machine import Facts, FolderFacts

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)
# Batches of torch's workers pass through /dev/shm: 2 x 4 of 256 float32 images of 224 x 224 are
# 1.2 GB. Docker's default is 64 MiB.
SMALL_SHM_BYTES = 2**30
# Workers, their pipes and shared tensors, and a folder's files take some hundred.
FEW_OPEN_FILES = 1024
SMALL_FREE_BYTES = 2**30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p")
_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="Folder for data, packs or a cache, to check too."),
]


def doctor(
    folder: Folder = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A dataset's URL: does its store answer, accept the credentials, list and serve "
            "ranges; how long a request takes."
        ),
    ] = None,
    storage_option: StorageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: Python, torch, DALI, GPU, cores, threads, memory, limits, launcher.

    With DIR also its disk, and a cache's limit, owner, leftovers and jobs; with --url a store.
    Each line says ok, warn or fail, and what to do. Leaves with 1 if a check fails.
    """
    from penstock.pipeline.cli.machine import gather

    if folder is not None and ":/" in str(folder):
        raise ConfigError(f"doctor: got {str(folder)!r}, wanted a local folder.")
    options = parse_storage_options(storage_option) or {}
    found = list(checks(gather(folder)))
    if url is not None:
        from penstock.pipeline.cli.doctor_remote import remote_checks, remote_facts

        found += remote_checks(remote_facts(url, options))
    failed = any(check.status == "fail" for check in found)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}))
    else:
        _print(found)
    if failed:
        raise typer.Exit(1)


def checks(facts: Facts) -> Iterator[Check]:
    """Judge a machine, in the order in which its faults would show."""
    yield _python(facts)
    yield from package_checks(facts.packages)
    yield _torch(facts)
    yield _dali(facts)
    yield _decoding(facts)
    yield _gpu(facts)
    yield _cores(facts)
    yield _threads(facts)
    yield _shm(facts)
    yield _open_files(facts)
    yield _world(facts)
    if facts.folder is not None:
        yield _folder(facts.folder)
        if facts.folder.is_folder:
            yield _space(facts.folder)
            yield _file_system(facts.folder)
        if facts.cache is not None:
            yield from cache_checks(facts.cache, facts.folder)


def _python(facts: Facts) -> Check:
    found = f"{'.'.join(map(str, facts.python))}, {facts.system} {facts.machine}"
    if facts.python[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Check(
            name="python", status="fail", found=found, remedy=f"Use Python {wanted} or newer."
        )
    if facts.system != "Linux":
        return Check(name="python", status="fail", found=found, remedy="DALI needs Linux.")
    return Check(name="python", status="ok", found=found)


def _torch(facts: Facts) -> Check:
    torch = facts.torch
    if torch.version is None or torch.error is not None:
        found = f"{torch.version or 'not installed'}: {torch.error}"
        return Check(name="torch", status="fail", found=found, remedy="pip install torch")
    found = f"{torch.version}, {f'CUDA {torch.cuda}' if torch.cuda else 'CPU build'}"
    if _numbers(torch.version)[:2] < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return Check(
            name="torch", status="fail", found=found, remedy=f"Use torch {wanted} or newer."
        )
    if facts.gpu_devices and torch.cuda is None:
        return Check(
            name="torch",
            status="warn",
            found=f"{found}, though {_count(facts.gpu_devices, 'GPU')} stands in /dev",
            remedy="Install torch's CUDA build to train on the GPU.",
        )
    return Check(name="torch", status="ok", found=found)


def _dali(facts: Facts) -> Check:
    dali = facts.dali
    if dali.version is None:
        return Check(
            name="dali",
            status="fail",
            found="not installed",
            remedy=f"pip install 'penstock[{_extra(facts)}]'",
        )
    found = f"{dali.version} for CUDA {dali.cuda}"
    if len(facts.dali_builds) > 1:
        return Check(
            name="dali",
            status="fail",
            found=f"{' and '.join(facts.dali_builds)} overwrite each other's files",
            remedy=f"pip uninstall {' '.join(facts.dali_builds)}; then install one of them.",
        )
    if dali.error is not None:
        return Check(
            name="dali",
            status="fail",
            found=f"{found}, but doesn't import: {dali.error}",
            remedy=f"pip install --force-reinstall 'penstock[{_extra(facts)}]'",
        )
    wanted = _numbers(dali.cuda or "")[:1]
    if facts.gpus and facts.driver_cuda and facts.driver_cuda[:1] < wanted:
        return Check(
            name="dali",
            status="fail",
            found=f"{found}; the driver runs CUDA {_dotted(facts.driver_cuda)}",
            remedy=f"Update the driver, or pip uninstall {facts.dali_builds[0]} and "
            f"pip install 'penstock[{_extra(facts)}]'.",
        )
    if facts.gpus and facts.torch.cuda and _numbers(facts.torch.cuda)[:1] != wanted:
        return Check(
            name="dali",
            status="warn",
            found=f"{found}; torch is built for CUDA {facts.torch.cuda}",
            remedy="It works, with two CUDA runtimes in memory; better take both for one CUDA.",
        )
    return Check(name="dali", status="ok", found=found)


def _decoding(facts: Facts) -> Check:
    if facts.decoded:
        return Check(name="decoding", status="ok", found="a JPEG was decoded on the CPU")
    if facts.decode_error is None:
        return Check(
            name="decoding",
            status="warn",
            found="not tried",
            remedy="It needs DALI and Pillow: pip install 'penstock[dali]' pillow",
        )
    return Check(
        name="decoding",
        status="fail",
        found=facts.decode_error,
        remedy=f"pip install --force-reinstall 'penstock[{_extra(facts)}]'",
    )


def _gpu(facts: Facts) -> Check:
    if facts.gpus:
        names = ", ".join(f"{gpu.name} ({format_size(gpu.memory_bytes)})" for gpu in facts.gpus)
        driver = f"; driver for CUDA {_dotted(facts.driver_cuda)}" if facts.driver_cuda else ""
        return Check(name="gpu", status="ok", found=names + driver)
    if facts.gpu_devices and facts.torch.cuda:
        return Check(
            name="gpu",
            status="fail",
            found=f"{_count(facts.gpu_devices, 'GPU')} in /dev that torch can't use",
            remedy=f"Update the driver, or install a torch for an older CUDA than "
            f"{facts.torch.cuda}; check CUDA_VISIBLE_DEVICES.",
        )
    return Check(name="gpu", status="ok", found="none: CPU decoding")


def _cores(facts: Facts) -> Check:
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


def _threads(facts: Facts) -> Check:
    if facts.torch_threads is None:
        return Check(
            name="threads", status="warn", found="unknown without torch", remedy="Install torch."
        )
    told = isinstance(facts.world, str)
    local = 1 if isinstance(facts.world, str) else facts.world.local_size
    ranks = local if local > 1 and not told else max(1, len(facts.gpus))
    total = ranks * facts.torch_threads
    found = (
        f"{_count(ranks, 'rank')} x {facts.torch_threads} of torch = {total}, on "
        f"{_count(facts.usable, 'core')}"
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


def _shm(facts: Facts) -> Check:
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


def _open_files(facts: Facts) -> Check:
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


def _world(facts: Facts) -> Check:
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


def _folder(folder: FolderFacts) -> Check:
    if not folder.exists or not folder.is_folder:
        found = f"{folder.path}: {'not a folder' if folder.exists else 'not there'}"
        return Check(name="folder", status="fail", found=found, remedy=f"mkdir -p {folder.path}")
    if not folder.readable:
        return Check(
            name="folder",
            status="fail",
            found=f"{folder.path}: not readable",
            remedy="Give this user the rights to read and enter it.",
        )
    if not folder.writable:
        return Check(
            name="folder",
            status="warn",
            found=f"{folder.path}: read-only",
            remedy="Fine for data: its index lies beside it, or where penstock index --out "
            "says. A cache needs a folder to write to.",
        )
    return Check(name="folder", status="ok", found=f"{folder.path}: writable")


def _space(folder: FolderFacts) -> Check:
    found = f"{format_size(folder.free_bytes)} of {format_size(folder.total_bytes)} free"
    if folder.free_files == 0:
        return Check(
            name="space",
            status="fail",
            found=f"{found}, but not one file more may be made (no inodes)",
            remedy="Delete or pack small files: penstock pack makes one file of thousands.",
        )
    if folder.free_bytes >= SMALL_FREE_BYTES:
        return Check(name="space", status="ok", found=found)
    return Check(
        name="space",
        status="warn",
        found=found,
        remedy="Too little for a pack or a cache: make room or choose another disk.",
    )


def _file_system(folder: FolderFacts) -> Check:
    kind = folder.kind
    if kind in _NETWORK:
        return Check(
            name="file system",
            status="warn",
            found=kind,
            remedy='Files that change under a map kill the process: DataLoader(read="pread"); a '
            "pack reads faster here than a folder of small files.",
        )
    if kind.startswith("fuse"):
        return Check(
            name="file system",
            status="warn",
            found=kind,
            remedy="Each read is a round trip: pack the data, or read it by its URL with cache=.",
        )
    if kind == "tmpfs":
        return Check(
            name="file system",
            status="warn",
            found="tmpfs",
            remedy="What lies here takes memory and is gone after a restart.",
        )
    return Check(name="file system", status="ok", found=kind or "unknown")


def _print(found: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("name", "status", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for check in found:
        style = _STYLE[check.status]
        table.add_row(check.name, f"[{style}]{check.status}[/]", _plain(check.found))
        if check.remedy:
            table.add_row("", "", f"[{style}]→[/] {_plain(check.remedy)}")
    Console().print(table)


def _plain(text: str) -> str:
    """Brackets that rich would take for its markup stay what they are."""
    return text.replace("[", r"\[")


def _extra(facts: Facts) -> str:
    """The extra whose DALI fits the driver; CUDA 13's where there is none, as CPU decoding does."""
    return "cuda12" if facts.driver_cuda and facts.driver_cuda[0] < 13 else "dali"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _limit(count: int) -> str:
    return "no limit" if count < 0 else f"{count:,}"
