"""List the doctor's checks of this machine, of a folder for data and of a cache folder.

The docstring of a check is its remedy, unless its verdict has another one. A part that is missing
or broken is a fact, never an error: the doctor must finish even where torch can't be imported.

A cache folder isn't opened as a job opens it, because that would repair the faults that the doctor
reports. Only a catalogue that can't be read is rebuilt, with a warning, as every job and command
does.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import io
import os
import platform
import re
import shutil
import sqlite3
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from importlib import machinery, metadata
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock
from penstock.cache import ConfigError, PlanError, StalledError, base
from penstock.cache.base import format_size
from penstock.cache.disk import FolderLayout, admin
from penstock.pipeline.cli.doctor_table import CheckTable, Finding, fail, ok, ok_if, warn
from penstock.pipeline.cli.output import count
from penstock.pipeline.plan import World, launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.doctor_table import DoctorFacts


MACHINE, FOLDER, CACHE = CheckTable(), CheckTable(), CheckTable()


def machine_findings(folder: Path | None) -> Iterator[Finding]:
    """Check this machine, in some seconds, as torch and DALI are imported. folder: also check it,
    and the cache in it."""
    yield from MACHINE.findings(MACHINE.gather())
    if folder is not None:
        facts = FOLDER.gather(path=folder)
        yield from FOLDER.findings(facts)
        if FolderLayout.is_cache(os.path.abspath(folder)):
            yield from CACHE.findings(CACHE.gather(**vars(facts)))


OLDEST_PYTHON, OLDEST_TORCH, OLDEST_ZARR = (3, 11), (2, 4), (3, 0, 8)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _interpreter(_: DoctorFacts) -> dict[str, Any]:
    system, machine = platform.system(), platform.machine()
    return {"python": platform.python_version(), "system": system, "machine": machine}


@MACHINE.check("python", _interpreter)
def _judge_python(f: DoctorFacts) -> Finding:
    found = f"{f.python}, {f.system} {f.machine}"
    if _numbers(f.python)[:2] < OLDEST_PYTHON:
        return fail(found, f"Use Python {_dotted(OLDEST_PYTHON)} or newer.")
    return ok(found) if f.system == "Linux" else fail(found, "DALI needs Linux.")


# --- our package ---------------------------------------------------------------------------------

PACKAGE = "penstock"
PACKAGE_HOME = Path(str(penstock.__file__)).resolve().parents[1]
"""The folder that holds our package: site-packages, or a checkout."""


def hiding(folder: Path, *, home: Path = PACKAGE_HOME) -> list[str]:
    """Return the names in a folder that hide our package from a script started in it."""
    if folder.resolve() == home:
        return []
    suffixes = machinery.all_suffixes()
    candidates = [folder / f"{PACKAGE}{suffix}" for suffix in suffixes]
    candidates += [folder / PACKAGE / f"__init__{suffix}" for suffix in suffixes]
    return [str(path) for path in candidates if path.is_file()]


@MACHINE.check("package", lambda _: {"hiding": hiding(Path.cwd())})
def _judge_package(f: DoctorFacts) -> Finding:
    """Rename it, or keep training scripts in another folder."""
    if f.hiding:
        return warn(f"shadowed in this folder by {', '.join(f.hiding)}")
    return ok("no file of this folder shadows it")


# --- software ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """An installed module. version: None if it isn't installed; error: the reason why it can't be
    imported; cuda: the CUDA version of its build, None for a CPU build."""

    version: str | None = None
    error: str | None = None
    cuda: str | None = None


def _module(distribution: str, *names: str) -> ModuleFacts:
    """Import the modules of a distribution."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ModuleFacts()
    try:
        for name in names:
            importlib.import_module(name)
    # A broken installation can fail in any way; the reason is reported.
    except Exception as error:
        return ModuleFacts(version=version, error=_line(error))
    return ModuleFacts(version=version)


def _line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _torch(_: DoctorFacts) -> dict[str, Any]:
    """Return torch's facts. gpus: as torch sees them; gpu_devices: device files of GPUs."""
    devices = sum(path[11:].isdigit() for path in glob.glob("/dev/nvidia*"))
    facts = _module("torch", "torch")
    found: dict[str, Any] = {"torch": facts, "torch_threads": None, "gpus": []}
    found["gpu_devices"] = devices
    if facts.version is None or facts.error is not None:
        return found
    torch: Any = importlib.import_module("torch")
    is_usable = torch.version.cuda is not None and torch.cuda.is_available()
    numbers = range(torch.cuda.device_count() if is_usable else 0)
    gpus = [torch.cuda.get_device_properties(number) for number in numbers]
    return found | {
        "torch": replace(facts, version=torch.__version__, cuda=torch.version.cuda),
        "torch_threads": torch.get_num_threads(),
        "gpus": [f"{gpu.name} ({format_size(gpu.total_memory)})" for gpu in gpus],
    }


@MACHINE.check("torch", _torch)
def _judge_torch(f: DoctorFacts) -> Finding:
    """pip install torch"""
    version, cuda = f.torch.version, f.torch.cuda
    if version is None or f.torch.error is not None:
        return fail("not installed" if version is None else f"{version}: {f.torch.error}")
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'CPU build'}"
    if _numbers(version)[:2] < OLDEST_TORCH:
        return fail(found, f"Use torch {_dotted(OLDEST_TORCH)} or newer.")
    if f.gpu_devices and cuda is None:
        found += f", but /dev has {count(f.gpu_devices, 'GPU')}"
        return warn(found, "Install torch's CUDA build to train on the GPU.")
    return ok(found)


def _dali(_: DoctorFacts) -> dict[str, Any]:
    """Return DALI's facts. dali_builds: the names of its installed distributions. driver_cuda: the
    newest CUDA version that the driver supports, such as (13, 0)."""
    names = (dist.metadata["Name"] for dist in metadata.distributions())
    builds = sorted({name for name in names if name and name.startswith("nvidia-dali-cuda")})
    facts = _module(builds[0], "nvidia.dali.fn") if builds else ModuleFacts()
    match = re.search(r"cuda(\d+?)(\d)$", builds[0]) if builds else None
    dali = replace(facts, cuda=f"{match[1]}.{match[2]}" if match else None)
    return {"dali": dali, "dali_builds": builds, "driver_cuda": _driver_cuda()}


def _driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, or None without a driver.

    cuDriverGetVersion returns 1000 * major + 10 * minor.
    """
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if code == 0 else None


def _install_dali(f: DoctorFacts, options: str = "") -> str:
    """Return the command for the DALI that the driver supports; CUDA 13's without a driver, which
    decodes on the CPU."""
    extra = "cuda12" if f.driver_cuda and f.driver_cuda[0] < 13 else "dali"
    return f"pip install {options}'penstock[{extra}]'"


@MACHINE.check("dali", _dali)
def _judge_dali(f: DoctorFacts) -> Finding:
    if f.dali.version is None:
        return fail("not installed", _install_dali(f))
    if len(f.dali_builds) > 1:
        remedy = f"pip uninstall {' '.join(f.dali_builds)}; then install one of them."
        return fail(f"{' and '.join(f.dali_builds)} overwrite each other's files", remedy)
    found = f"{f.dali.version} for CUDA {f.dali.cuda}"
    if f.dali.error is not None:
        found += f", but doesn't import: {f.dali.error}"
        return fail(found, _install_dali(f, "--force-reinstall "))
    built_for = _numbers(f.dali.cuda or "")[:1]
    if f.gpus and f.driver_cuda and f.driver_cuda[:1] < built_for:
        found += f", but the driver supports CUDA {_dotted(f.driver_cuda)}"
        other = f"pip uninstall {f.dali_builds[0]} and {_install_dali(f)}"
        return fail(found, f"Update the driver, or {other}.")
    if f.gpus and f.torch.cuda and _numbers(f.torch.cuda)[:1] != built_for:
        remedy = "This works but loads two CUDA runtimes; prefer builds for the same CUDA."
        return warn(f"{found}; torch is built for CUDA {f.torch.cuda}", remedy)
    return ok(found)


def _decode(f: DoctorFacts) -> dict[str, Any]:
    """Decode a small JPEG with DALI. decode_error: "" after a success, None if it wasn't tried."""
    if not f.dali.version or f.dali.error:
        return {"decode_error": None}
    try:
        image, buffer = importlib.import_module("PIL.Image"), io.BytesIO()
        image.new("RGB", (24, 16), (200, 100, 50)).save(buffer, "JPEG")
        verify = importlib.import_module("penstock.augment.verify").verify_images
        (fact,) = verify([np.frombuffer(buffer.getvalue(), np.uint8)], threads=1)
    # Any failure of DALI here would also end a training job.
    except Exception as error:
        return {"decode_error": _line(error)}
    return {"decode_error": getattr(fact, "reason", None) or ""}


@MACHINE.check("decoding", _decode)
def _judge_decoding(f: DoctorFacts) -> Finding:
    """The test needs DALI and Pillow: pip install 'penstock[dali]' pillow"""
    if f.decode_error is None:
        return warn("not tried")
    if f.decode_error:
        return fail(f.decode_error, _install_dali(f, "--force-reinstall "))
    return ok("a JPEG was decoded on the CPU")


@MACHINE.check("zarr", lambda _: {"zarr": _module("zarr", "numcodecs", "zarr")})
def _judge_zarr(f: DoctorFacts) -> Finding:
    zarr, install = f.zarr, "pip install -U 'penstock[zarr]'"
    if zarr.version is None:  # an optional dependency
        return ok(f"not installed; Zarr datasets need it: {install}")
    if zarr.error is not None:
        return warn(f"{zarr.version}, but doesn't import: {zarr.error}", install)
    if _numbers(zarr.version) < OLDEST_ZARR:
        found = f"{zarr.version}: some codecs need {_dotted(OLDEST_ZARR)} or newer"
        return warn(found, install)
    return ok(f"{zarr.version}, with numcodecs")


@MACHINE.check("gpu")
def _judge_gpu(f: DoctorFacts) -> Finding:
    if f.gpus:
        driver = f"; driver for CUDA {_dotted(f.driver_cuda)}" if f.driver_cuda else ""
        return ok(f"{', '.join(f.gpus)}{driver}")
    if f.gpu_devices and f.torch.cuda:
        older = f"install a torch for an older CUDA than {f.torch.cuda}"
        remedy = f"Update the driver, or {older}; check CUDA_VISIBLE_DEVICES."
        return fail(f"{count(f.gpu_devices, 'GPU')} in /dev that torch can't use", remedy)
    return ok("none: CPU decoding")


# --- limits --------------------------------------------------------------------------------------

# Torch's workers pass batches through /dev/shm: 2 x 4 batches of 256 float32 images of 224 x 224
# take 1.2 GB. Docker's default is 64 MiB.
SMALL_SHM_BYTES = 2**30
# Workers, their pipes and shared tensors, and the files of a folder need some hundreds.
FEW_OPEN_FILES = 1024


def _cores(_: DoctorFacts) -> dict[str, Any]:
    """Return the processors of the machine, those of this process, and those within quotas."""
    allowed = len(base.allowed_cores())
    return {"cpus": base.machine_cores(), "affinity": allowed, "usable": base.usable_cores()}


@MACHINE.check("cores", _cores)
def _judge_cores(f: DoctorFacts) -> Finding:
    """Request more cores per task: decoding and training share this one."""
    found = f"{f.usable} usable of {f.cpus}"
    if f.usable >= f.cpus:
        return ok(found)
    limits = [f"CPU affinity {f.affinity}"] if f.affinity < f.cpus else []
    limits += ["the control group's CPU quota"] if f.usable < f.affinity else []
    return ok_if(f.usable > 1, f"{found} ({' and '.join(limits)})")


def _world(_: DoctorFacts) -> dict[str, Any]:
    """Return the World and its launcher, or the reason why they are unknown."""
    is_batch = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    found = {"slurm_batch": is_batch, "omp_threads": os.environ.get("OMP_NUM_THREADS")}
    try:
        return {**found, "world": World.detect(), "launcher": launcher()}
    except PlanError as error:
        return {**found, "world": str(error), "launcher": None}


@MACHINE.check("threads")
def _judge_threads(f: DoctorFacts) -> Finding:
    if f.torch_threads is None:
        return warn("unknown without torch", "Install torch.")
    local = 1 if isinstance(f.world, str) else f.world.local_size
    ranks = local if local > 1 else max(1, len(f.gpus))
    total = ranks * f.torch_threads
    each, cores = f"{count(ranks, 'rank')} x {f.torch_threads} of torch", count(f.usable, "core")
    omp = "" if f.omp_threads is None else f" (OMP_NUM_THREADS={f.omp_threads})"
    fewer = f"Set OMP_NUM_THREADS={max(1, f.usable // ranks)} or call torch.set_num_threads"
    remedy = f"{fewer}: more threads than cores wait for each other."
    return ok_if(total <= f.usable, f"{each} = {total}, on {cores}{omp}", remedy)


def _shm(_: DoctorFacts) -> dict[str, Any]:
    try:
        return {"shm": shutil.disk_usage("/dev/shm")}
    except OSError:
        return {"shm": None}


@MACHINE.check("/dev/shm", _shm)
def _judge_shm(f: DoctorFacts) -> Finding:
    """Torch's workers pass batches through it: use docker run --shm-size=8g or --ipc=host. Native
    datasets don't need it.
    """
    if f.shm is None:
        return warn("not there", "Torch's workers need it: mount it, or use num_workers=0.")
    found = f"{format_size(f.shm.total)}, {format_size(f.shm.free)} free"
    return ok_if(f.shm.free >= SMALL_SHM_BYTES, found)


@MACHINE.check("open files", lambda _: {"open_files": getrlimit(RLIMIT_NOFILE)})
def _judge_open_files(f: DoctorFacts) -> Finding:
    soft, hard = f.open_files
    shown = ["no limit" if limit < 0 else f"{limit:,}" for limit in (soft, hard)]
    remedy = f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}"
    is_well = soft < 0 or soft >= FEW_OPEN_FILES
    return ok_if(is_well, f"{shown[0]} (up to {shown[1]})", remedy)


@MACHINE.check("world", _world)
def _judge_world(f: DoctorFacts) -> Finding:
    """Correct the launcher's variables."""
    if isinstance(f.world, str):
        return fail(f.world)
    if f.launcher is not None:
        rank = f"rank {f.world.rank} of {f.world.size}"
        local = f"local rank {f.world.local_rank} of {f.world.local_size}"
        return ok(f"{rank}, {local}, from {f.launcher}")
    if f.slurm_batch:
        return ok("one process: a Slurm script that wasn't started by srun")
    return ok("one process, no launcher")


# --- a folder ------------------------------------------------------------------------------------

SMALL_FREE_BYTES = 2**30


def folder_facts(path: Path) -> dict[str, Any]:
    """Collect the facts of a folder. kind: of its file system, such as ext4; "" if unknown."""
    exists = path.exists()
    space = os.statvfs(path) if exists else None
    return {
        "exists": exists,
        "is_folder": path.is_dir(),
        "readable": os.access(path, os.R_OK | os.X_OK),
        "writable": os.access(path, os.W_OK),
        "free_bytes": space.f_bavail * space.f_frsize if space else 0,
        "total_bytes": space.f_blocks * space.f_frsize if space else 0,
        "free_files": space.f_favail if space and space.f_files else None,
        "kind": base.file_system(str(path)) if exists else "",
        "network": base.is_network(str(path)),
    }


@FOLDER.check("folder", lambda f: folder_facts(f.path), is_gate=True)
def _judge_folder(f: DoctorFacts) -> Finding:
    """Fine for data, with an index elsewhere (penstock index --out). A cache needs a writable
    folder.
    """
    if not f.exists or not f.is_folder:
        found = f"{f.path}: {'not a folder' if f.exists else 'not there'}"
        return fail(found, f"mkdir -p {f.path}")
    if not f.readable:
        return fail(f"{f.path}: not readable", "Give this user the rights to read and enter it.")
    return ok_if(f.writable, f"{f.path}: {'writable' if f.writable else 'read-only'}")


@FOLDER.check("space")
def _judge_space(f: DoctorFacts) -> Finding:
    """Too little for a pack or a cache: free some space or choose another disk."""
    found = f"{format_size(f.free_bytes)} of {format_size(f.total_bytes)} free"
    if f.free_files == 0:
        remedy = "Delete or pack small files: penstock pack joins thousands into one file."
        return fail(f"{found}, but no inodes are left for new files", remedy)
    return ok_if(f.free_bytes >= SMALL_FREE_BYTES, found)


@FOLDER.check("file system")
def _judge_file_system(f: DoctorFacts) -> Finding:
    """A mapped file that is truncated kills the process: use DataLoader(read="pread") if files may
    change. A pack is faster here than small files.
    """
    if f.kind.startswith("fuse"):
        remedy = "Each read is a round trip: pack the data, or read it by its URL with cache=."
        return warn(f.kind, remedy)
    if f.kind == "tmpfs":
        return warn(f.kind, "Files here use memory and are lost when the machine restarts.")
    return ok_if(not f.network, f.kind or "unknown")


# --- a cache folder ------------------------------------------------------------------------------

# A blob is one file, and two while it is filled.
FEW_FREE_FILES = 10_000


def cache_facts(path: Path) -> dict[str, Any]:
    """Collect the facts of a cache folder: the owner, and the fields of `CacheSummary` if it can be
    used.

    problem: the reason why it can't, with its remedy; None if it can. owner, user: user ids of the
    folder and of this process; mode: permission bits.
    """
    root = os.path.abspath(path)
    folder = os.stat(root)
    found = {"owner": folder.st_uid, "user": os.geteuid(), "mode": folder.st_mode & 0o7777}
    try:
        return {**found, "problem": None, **asdict(admin.inspect(root))}
    except ConfigError as error:
        problem, remedy = str(error), "Use another folder, or a newer penstock."
    except base.StrangeFileError as error:
        problem = f"{error.filename}: {error.strerror}"
        remedy = "Jobs don't use such a folder. Give each user a folder of their own."
    except (OSError, sqlite3.Error, StalledError) as error:
        problem = f"{root}: its catalogue can't be read ({error})"
        remedy = "Check the folder's permissions and disk. Jobs don't use such a cache."
    return {**found, "problem": problem, "remedy": remedy}


@CACHE.check("cache", lambda f: cache_facts(f.path), is_gate=True)
def _judge_cache(f: DoctorFacts) -> Finding:
    if f.problem is not None:
        return fail(f.problem, f.remedy)
    return ok(f"{count(f.blobs, 'blob')}, {format_size(f.used_bytes)}")


@CACHE.check("owner")
def _judge_owner(f: DoctorFacts) -> Finding:
    found = f"user {f.owner}, mode {f.mode:04o}"
    if f.owner != f.user:
        remedy = "Jobs of this user can't use it: give them a cache folder of their own."
        return fail(f"{found}; this is user {f.user}", remedy)
    if f.mode & 0o022:
        remedy = "chmod go-w: other users could change the bytes that a job trains on."
        return warn(f"{found}: other users may write here", remedy)
    return ok(found)


@CACHE.check("limit")
def _judge_limit(f: DoctorFacts) -> Finding:
    """Lower max_bytes= or free some space: when the disk is full, the remaining samples are fetched
    from the remote each epoch.
    """
    if not f.max_bytes:
        return ok("none yet: the first job sets it")
    found = f"{format_size(f.used_bytes)} of {format_size(f.max_bytes)} used"
    if f.used_bytes > f.max_bytes:
        remedy = "penstock cache evict DIR --to SIZE, when no job uses the folder."
        return warn(f"{found}: more than the limit", remedy)
    if f.max_bytes > (room := f.free_bytes + f.used_bytes):
        return warn(f"{found}, but the disk has room for only {format_size(room)}")
    return ok(found)


@CACHE.check("inodes")
def _judge_inodes(f: DoctorFacts) -> Finding:
    """A blob is a file: delete small files on this disk, or choose another."""
    if f.free_files is None:
        return ok("not limited")
    return ok_if(f.free_files >= FEW_FREE_FILES, f"{f.free_files:,} free")


@CACHE.check("cache disk")
def _judge_cache_disk(f: DoctorFacts) -> Finding | None:
    """A cache must lie on a disk of this node: NVMe, or /dev/shm for a small one."""
    return fail(f"{f.kind}: not a local file system") if f.network else None


@CACHE.check("boot")
def _judge_boot(f: DoctorFacts) -> Finding:
    if not f.unverified:
        return ok("all blobs were checked since the last boot")
    when = "a job checks each one when it opens it (penstock cache verify DIR checks all)"
    return ok(f"{count(f.unverified, 'blob')} not checked since the last boot: {when}")


@CACHE.check("leftovers")
def _judge_leftovers(f: DoctorFacts) -> Finding:
    """The next job uses or frees them; penstock cache gc DIR does so now."""
    nouns = ("fill of a dead process", "dead job", "stray file")
    numbers = zip((f.dead_fills, f.dead_jobs, f.strays), nouns, strict=True)
    found = [count(number, noun) for number, noun in numbers if number]
    return warn(f"{', '.join(found)}, {format_size(f.leftover_bytes)}") if found else ok("none")


@CACHE.check("jobs")
def _judge_jobs(f: DoctorFacts) -> Iterator[Finding]:
    """The rest is fetched each epoch. A larger max_bytes, or fewer jobs on this cache, would keep
    more.
    """
    if not f.jobs:
        yield ok("none uses this cache now")
    by_label = defaultdict(list)
    for job in f.jobs:
        by_label[job["label"]].append(job)
    for label, jobs in sorted(by_label.items()):
        share, wanted = (max(job[f"{name}_bytes"] for job in jobs) for name in ("share", "wanted"))
        processes = count(len({job["pid"] for job in jobs}), "process")
        found = f"{label}: {processes}, share {format_size(share)} for {format_size(wanted)}"
        is_kept = share >= wanted
        stays = "" if is_kept else f": {100 * share / wanted:.0f} % stays cached"
        yield ok_if(is_kept, f"{found}{stays}")
