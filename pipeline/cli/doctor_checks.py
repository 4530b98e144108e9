"""Judge the facts of a machine: one `Check` for each line of the doctor's report.

The lines are about our package, the software, limits, a folder for data, and a cache folder.
Every check is a pure function of what `doctor_facts` collected. This module imports neither numpy
nor torch, because `penstock --help` imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.cache.base import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.pipeline.cli.doctor_facts import (
        CacheFacts,
        FolderFacts,
        MachineFacts,
        PackageFacts,
    )

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. found: the observed state. remedy: what to do, "" if nothing."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 rank, 2 ranks, 2 processes."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


_SHOWN = 3
_REINSTALL = "pip install --force-reinstall --no-deps penstock"


def package_checks(facts: PackageFacts) -> Iterator[Check]:
    """Yield one check per fault of our installed package, or one that reports none."""
    faults = list(_faults(facts))
    yield from faults
    if not faults:
        state = {"wheel": "as installed; ", "checkout": "only files of the checkout; "}
        begin = state.get(facts.source or "", "")
        yield Check(name="package", status="ok", found=f"{begin}no file of this folder shadows it")


def _faults(facts: PackageFacts) -> Iterator[Check]:
    if facts.hiding:
        yield Check(
            name="package",
            status="warn",
            found=f"shadowed in this folder by {', '.join(facts.hiding)}",
            remedy="Rename it, or keep training scripts in another folder.",
        )
    for one in facts.namesakes:
        where = "in the same folder" if one.is_here else "elsewhere on Python's path"
        yield Check(
            name="package",
            status="fail" if one.is_here else "warn",
            found=f"{one.distribution} installs a package `penstock`, too, {where}",
            remedy=f"Keep {one.distribution} in another environment: pip uninstall "
            f"{one.distribution}{f', then {_REINSTALL}' if one.is_here else ''}.",
        )
    if facts.altered:
        yield Check(
            name="package",
            status="fail",
            found=f"{_file_names(facts.altered)} not as installed: another package or a user "
            "changed it",
            remedy=f"{_REINSTALL}; make your own changes in a checkout (pip install -e).",
        )
    if facts.foreign:
        missing = "tracked by this checkout" if facts.source == "checkout" else "of penstock"
        yield Check(
            name="package",
            status="warn",
            found=f"{_file_names(facts.foreign)} in penstock's folders but not {missing}",
            remedy="Move it elsewhere if it is yours, otherwise delete it: Python can import it as "
            "a part of penstock.",
        )


def _file_names(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
    return f"{count(len(files), 'file')} ({', '.join(files[:_SHOWN])}{more})"


OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)
OLDEST_ZARR = (3, 0, 8)


def software_checks(facts: MachineFacts) -> Iterator[Check]:
    """Check torch, DALI, a test decode, Zarr and the GPUs."""
    yield _torch(facts)
    yield _dali(facts)
    yield _decoding(facts)
    yield _zarr(facts)
    yield _gpu(facts)


def python_check(facts: MachineFacts) -> Check:
    """Check the interpreter and the operating system."""
    found = f"{'.'.join(map(str, facts.python))}, {facts.system} {facts.machine}"
    if facts.python[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Check(
            name="python", status="fail", found=found, remedy=f"Use Python {wanted} or newer."
        )
    if facts.system != "Linux":
        return Check(name="python", status="fail", found=found, remedy="DALI needs Linux.")
    return Check(name="python", status="ok", found=found)


def _torch(facts: MachineFacts) -> Check:
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
            found=f"{found}, but /dev has {count(facts.gpu_devices, 'GPU')}",
            remedy="Install torch's CUDA build to train on the GPU.",
        )
    return Check(name="torch", status="ok", found=found)


def _dali(facts: MachineFacts) -> Check:
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
            found=f"{found}, but the driver supports CUDA {_dotted(facts.driver_cuda)}",
            remedy=f"Update the driver, or pip uninstall {facts.dali_builds[0]} and "
            f"pip install 'penstock[{_extra(facts)}]'.",
        )
    if facts.gpus and facts.torch.cuda and _numbers(facts.torch.cuda)[:1] != wanted:
        return Check(
            name="dali",
            status="warn",
            found=f"{found}; torch is built for CUDA {facts.torch.cuda}",
            remedy="This works but loads two CUDA runtimes; prefer builds for the same CUDA.",
        )
    return Check(name="dali", status="ok", found=found)


def _decoding(facts: MachineFacts) -> Check:
    if facts.decoded:
        return Check(name="decoding", status="ok", found="a JPEG was decoded on the CPU")
    if facts.decode_error is None:
        return Check(
            name="decoding",
            status="warn",
            found="not tried",
            remedy="The test needs DALI and Pillow: pip install 'penstock[dali]' pillow",
        )
    return Check(
        name="decoding",
        status="fail",
        found=facts.decode_error,
        remedy=f"pip install --force-reinstall 'penstock[{_extra(facts)}]'",
    )


def _zarr(facts: MachineFacts) -> Check:
    zarr, install = facts.zarr, "pip install -U 'penstock[zarr]'"
    if zarr.version is None:  # an optional dependency
        found = f"not installed; Zarr datasets need it: {install}"
        return Check(name="zarr", status="ok", found=found)
    if zarr.error is not None:
        found = f"{zarr.version}, but doesn't import: {zarr.error}"
        return Check(name="zarr", status="warn", found=found, remedy=install)
    if _numbers(zarr.version) < OLDEST_ZARR:
        wanted = ".".join(map(str, OLDEST_ZARR))
        found = f"{zarr.version}: some codecs need {wanted} or newer"
        return Check(name="zarr", status="warn", found=found, remedy=install)
    return Check(name="zarr", status="ok", found=f"{zarr.version}, with numcodecs")


def _gpu(facts: MachineFacts) -> Check:
    if facts.gpus:
        names = ", ".join(f"{gpu.name} ({format_size(gpu.memory_bytes)})" for gpu in facts.gpus)
        driver = f"; driver for CUDA {_dotted(facts.driver_cuda)}" if facts.driver_cuda else ""
        return Check(name="gpu", status="ok", found=names + driver)
    if facts.gpu_devices and facts.torch.cuda:
        return Check(
            name="gpu",
            status="fail",
            found=f"{count(facts.gpu_devices, 'GPU')} in /dev that torch can't use",
            remedy=f"Update the driver, or install a torch for an older CUDA than "
            f"{facts.torch.cuda}; check CUDA_VISIBLE_DEVICES.",
        )
    return Check(name="gpu", status="ok", found="none: CPU decoding")


def _extra(facts: MachineFacts) -> str:
    """Return the extra whose DALI supports the driver; CUDA 13's without a driver, which decodes on
    the CPU."""
    return "cuda12" if facts.driver_cuda and facts.driver_cuda[0] < 13 else "dali"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# Torch's workers pass batches through /dev/shm: 2 x 4 batches of 256 float32 images of 224 x 224
# take 1.2 GB. Docker's default is 64 MiB.
SMALL_SHM_BYTES = 2**30
# Workers, their pipes and shared tensors, and the files of a folder need some hundreds.
FEW_OPEN_FILES = 1024


def limit_checks(facts: MachineFacts) -> Iterator[Check]:
    """Check the cores, threads, shared memory, open files and ranks of this process."""
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
        remedy="Request more cores per task: decoding and training share this one.",
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
            remedy="Torch's workers need it: mount it, or use num_workers=0.",
        )
    total, free = facts.shm
    found = f"{format_size(total)}, {format_size(free)} free"
    if free >= SMALL_SHM_BYTES:
        return Check(name="/dev/shm", status="ok", found=found)
    return Check(
        name="/dev/shm",
        status="warn",
        found=found,
        remedy="Torch's workers pass batches through it: use docker run --shm-size=8g or "
        "--ipc=host. Native datasets don't need it.",
    )


def _open_files(facts: MachineFacts) -> Check:
    soft, hard = facts.open_files
    found = f"{_limit_text(soft)} (up to {_limit_text(hard)})"
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
        found = "one process: a Slurm script that wasn't started by srun"
        return Check(name="world", status="ok", found=found)
    return Check(name="world", status="ok", found="one process, no launcher")


def _limit_text(count: int) -> str:
    return "no limit" if count < 0 else f"{count:,}"


SMALL_FREE_BYTES = 2**30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p")


def folder_checks(folder: FolderFacts) -> Iterator[Check]:
    """Check a folder: its existence, its free space and its file system."""
    yield _folder(folder)
    if folder.is_folder:
        yield _space(folder)
        yield _file_system(folder)


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
            remedy="Fine for data, with an index elsewhere (penstock index --out). A cache needs "
            "a writable folder.",
        )
    return Check(name="folder", status="ok", found=f"{folder.path}: writable")


def _space(folder: FolderFacts) -> Check:
    found = f"{format_size(folder.free_bytes)} of {format_size(folder.total_bytes)} free"
    if folder.free_files == 0:
        return Check(
            name="space",
            status="fail",
            found=f"{found}, but no inodes are left for new files",
            remedy="Delete or pack small files: penstock pack joins thousands into one file.",
        )
    if folder.free_bytes >= SMALL_FREE_BYTES:
        return Check(name="space", status="ok", found=found)
    return Check(
        name="space",
        status="warn",
        found=found,
        remedy="Too little for a pack or a cache: free some space or choose another disk.",
    )


def _file_system(folder: FolderFacts) -> Check:
    kind = folder.kind
    if kind in _NETWORK:
        return Check(
            name="file system",
            status="warn",
            found=kind,
            remedy="A mapped file that is truncated kills the process: use "
            'DataLoader(read="pread") if files may change. A pack is faster here than small files.',
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
            remedy="Files here use memory and are lost when the machine restarts.",
        )
    return Check(name="file system", status="ok", found=kind or "unknown")


# A blob is one file, and two while it is filled.
FEW_FREE_FILES = 10_000


def cache_checks(cache: CacheFacts, folder: FolderFacts) -> Iterator[Check]:
    """Check a cache folder: owner, limit, inodes, disk, leftovers and jobs."""
    if cache.problem is not None:
        yield Check(name="cache", status="fail", found=cache.problem, remedy=cache.remedy)
        return
    yield _cache(cache)
    yield _owner(cache)
    yield _cache_limit(cache, folder)
    yield _inodes(folder)
    if cache.network:
        yield Check(
            name="cache disk",
            status="fail",
            found=f"{folder.kind}: not a local file system",
            remedy="A cache must lie on a disk of this node: NVMe, or /dev/shm for a small one.",
        )
    yield _boot(cache)
    yield _leftovers(cache)
    yield from _jobs(cache)


def _cache(cache: CacheFacts) -> Check:
    found = f"{count(cache.blobs, 'blob')}, {format_size(cache.used_bytes)}"
    return Check(name="cache", status="ok", found=found)


def _owner(cache: CacheFacts) -> Check:
    found = f"user {cache.owner}, mode {cache.mode:04o}"
    if cache.owner != cache.user:
        return Check(
            name="owner",
            status="fail",
            found=f"{found}; this is user {cache.user}",
            remedy="Jobs of this user can't use it: give them a cache folder of their own.",
        )
    if cache.mode & 0o022:
        return Check(
            name="owner",
            status="warn",
            found=f"{found}: other users may write here",
            remedy="chmod go-w: other users could change the bytes that a job trains on.",
        )
    return Check(name="owner", status="ok", found=found)


def _cache_limit(cache: CacheFacts, folder: FolderFacts) -> Check:
    if cache.max_bytes is None:
        return Check(name="limit", status="ok", found="none yet: the first job sets it")
    found = f"{format_size(cache.used_bytes)} of {format_size(cache.max_bytes)} used"
    if cache.used_bytes > cache.max_bytes:
        return Check(
            name="limit",
            status="warn",
            found=f"{found}: more than the limit",
            remedy="penstock cache evict DIR --to SIZE, when no job uses the folder.",
        )
    room = folder.free_bytes + cache.used_bytes
    if cache.max_bytes > room:
        return Check(
            name="limit",
            status="warn",
            found=f"{found}, but the disk has room for only {format_size(room)}",
            remedy="Lower max_bytes= or free some space: when the disk is full, the remaining "
            "samples are fetched from the remote each epoch.",
        )
    return Check(name="limit", status="ok", found=found)


def _inodes(folder: FolderFacts) -> Check:
    if folder.free_files is None:
        return Check(name="inodes", status="ok", found="not limited")
    found = f"{folder.free_files:,} free"
    if folder.free_files >= FEW_FREE_FILES:
        return Check(name="inodes", status="ok", found=found)
    return Check(
        name="inodes",
        status="warn",
        found=found,
        remedy="A blob is a file: delete small files on this disk, or choose another.",
    )


def _boot(cache: CacheFacts) -> Check:
    if not cache.unverified:
        return Check(name="boot", status="ok", found="all blobs were checked since the last boot")
    return Check(
        name="boot",
        status="ok",
        found=f"{count(cache.unverified, 'blob')} not checked since the last boot: a job checks "
        "each one when it opens it (penstock cache verify DIR checks all)",
    )


def _leftovers(cache: CacheFacts) -> Check:
    found = [
        count(number, noun)
        for number, noun in (
            (cache.dead_fills, "fill of a dead process"),
            (cache.dead_jobs, "dead job"),
            (cache.strays, "stray file"),
        )
        if number
    ]
    if not found:
        return Check(name="leftovers", status="ok", found="none")
    return Check(
        name="leftovers",
        status="warn",
        found=f"{', '.join(found)}, {format_size(cache.leftover_bytes)}",
        remedy="The next job uses or frees them; penstock cache gc DIR does so now.",
    )


def _jobs(cache: CacheFacts) -> Iterator[Check]:
    if not cache.jobs:
        yield Check(name="jobs", status="ok", found="none uses this cache now")
    for job in cache.jobs:
        part = job.share_bytes / job.wanted_bytes if job.wanted_bytes else 1.0
        found = (
            f"{job.label}: {count(job.processes, 'process')}, share {format_size(job.share_bytes)} "
            f"for {format_size(job.wanted_bytes)}"
        )
        if part >= 1:
            yield Check(name="job", status="ok", found=found)
            continue
        yield Check(
            name="job",
            status="warn",
            found=f"{found}: {100 * part:.0f} % stays cached",
            remedy="The rest is fetched each epoch. A larger max_bytes, or fewer jobs on this "
            "cache, would keep more.",
        )
