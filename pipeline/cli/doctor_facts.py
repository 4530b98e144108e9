"""Collect the facts of a machine for `penstock doctor`, which judges them in `doctor_checks`.

A part that is missing or broken is a fact, never an error: the doctor must finish even where torch
can't be imported.

A cache folder isn't opened as a job opens it, because that would repair the faults that the doctor
reports. Only a catalogue that can't be read is rebuilt, with a warning, as every job and command
does. The facts of our package show if its folder holds exactly the installed files: another
distribution or a user may have changed them, and installers merge folders silently.
"""

from __future__ import annotations

import base64
import ctypes
import glob
import hashlib
import importlib
import io
import os
import platform
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib import machinery, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock
from penstock.cache import ConfigError, PlanError, StalledError
from penstock.cache.base import (
    StrangeFileError,
    allowed_cores,
    is_network,
    machine_cores,
    usable_cores,
)
from penstock.cache.disk import FolderLayout, UncountedError, admin, boot_id, is_damage
from penstock.pipeline.plan import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.disk import BlobRow, Catalogue, JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder for data. kind: of its file system, such as ext4; "" if unknown."""

    path: str
    exists: bool
    is_folder: bool
    readable: bool
    writable: bool
    free_bytes: int
    total_bytes: int
    free_files: int | None
    kind: str


def folder_facts(path: Path, *, mounts: str | None = None) -> FolderFacts:
    """Collect the facts of a folder. mounts: replaces the text of /proc/self/mountinfo."""
    exists = path.exists()
    space = os.statvfs(path) if exists else None
    return FolderFacts(
        path=str(path),
        exists=exists,
        is_folder=path.is_dir(),
        readable=os.access(path, os.R_OK | os.X_OK),
        writable=os.access(path, os.W_OK),
        free_bytes=space.f_bavail * space.f_frsize if space else 0,
        total_bytes=space.f_blocks * space.f_frsize if space else 0,
        free_files=space.f_favail if space and space.f_files else None,
        kind=file_system_kind(path, _mounts() if mounts is None else mounts) if exists else "",
    )


def file_system_kind(path: Path, mounts: str) -> str:
    """Return the kind of the file system that holds a path, by the longest mount point above it.

    mounts: lines of /proc/self/mountinfo (proc(5)): the fifth word is the mount point with octal
    escapes, the first word after " - " the kind. A later line hides an earlier one.
    """
    place, kind, longest = os.path.realpath(path), "", -1
    for line in mounts.splitlines():
        left, dash, right = line.partition(" - ")
        words = left.split()
        if not dash or len(words) < 5 or not right.split():
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        if f"{place}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= longest:
            kind, longest = right.split()[0], len(mount)
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Live jobs on one dataset. label: its URL without credentials; wanted_bytes: the bytes that
    they read in an epoch; share_bytes: the part of them that the cache may keep."""

    label: str
    processes: int
    share_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """The facts of a cache folder.

    problem: the reason why it can't be used, with its remedy; None if it can. owner, user: user ids
    of the folder and of this process; mode: permission bits. network: True on a network file
    system. max_bytes: its limit, None before the first job; used_bytes: of blobs, fills and
    dropped files. unverified: blobs that weren't checked since the last boot. dead_fills,
    dead_jobs, strays, leftover_bytes: what `penstock cache gc` would remove.
    """

    problem: str | None = None
    remedy: str = ""
    owner: int = 0
    user: int = 0
    mode: int = 0o700
    network: bool = False
    max_bytes: int | None = None
    used_bytes: int = 0
    blobs: int = 0
    unverified: int = 0
    dead_fills: int = 0
    dead_jobs: int = 0
    strays: int = 0
    leftover_bytes: int = 0
    jobs: tuple[JobFacts, ...] = ()


def cache_facts(path: Path) -> CacheFacts | None:
    """Collect the facts of a cache folder; return None for any other folder."""
    root = os.path.abspath(path)
    if not FolderLayout.is_cache(root):
        return None
    folder = os.stat(root)
    found: dict[str, Any] = {
        "owner": folder.st_uid,
        "user": os.geteuid(),
        "mode": folder.st_mode & 0o7777,
        "network": is_network(root),
    }
    try:
        layout = FolderLayout(root)
        layout.check_format()
        try:
            found |= _catalogue_facts(layout)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            admin.stat(root)
            found |= _catalogue_facts(layout)
    except ConfigError as error:
        found |= {"problem": str(error), "remedy": "Use another folder, or a newer penstock."}
    except StrangeFileError as error:
        found |= {
            "problem": f"{error.filename}: {error.strerror}",
            "remedy": "Jobs don't use such a folder. Give each user a folder of their own.",
        }
    except (OSError, sqlite3.Error, StalledError) as error:
        found |= {
            "problem": f"{root}: its catalogue can't be read ({error})",
            "remedy": "Check the folder's permissions and disk. Jobs don't use such a cache.",
        }
    return CacheFacts(**found)


def _catalogue_facts(layout: FolderLayout) -> dict[str, Any]:
    from penstock.cache.disk import Catalogue

    if not os.path.lexists(os.path.join(layout.root, "catalogue.db")):
        if layout.names("blobs"):
            raise UncountedError("its catalogue is missing")
        return {}
    catalogue = Catalogue(layout.top, mend=False)
    try:
        limit = catalogue.numbers.get("max_bytes")
        rows = catalogue.blobs.rows()
        blobs = sum(row.state == "ready" for row in rows)
        return {
            "max_bytes": limit,
            "used_bytes": catalogue.blobs.used_bytes,
            "blobs": blobs,
            "unverified": _unverified(layout, blobs),
            **_jobs(layout, catalogue),
            **_leftovers(layout, rows),
        }
    finally:
        catalogue.close()


def _unverified(layout: FolderLayout, blobs: int) -> int:
    """Count the unchecked blobs: all of them if no job has run since the last boot."""
    seen = layout.boot in (None, boot_id())
    return len(layout.names("unverified")) if seen else blobs


def _jobs(layout: FolderLayout, catalogue: Catalogue) -> dict[str, Any]:
    locks = layout.locks("jobs")
    try:
        alive = [job for job in catalogue.jobs.rows() if locks.is_held(job.id + 1)]
    finally:
        locks.close()
    groups: dict[str, list[JobRow]] = defaultdict(list)
    for job in alive:
        groups[job.group].append(job)
    labels = catalogue.labels.all()
    jobs = [
        JobFacts(
            label=labels.get(group, ""),
            processes=len({job.pid for job in members}),
            share_bytes=max(job.share_bytes for job in members),
            wanted_bytes=max(job.wanted_bytes for job in members),
        )
        for group, members in sorted(groups.items())
    ]
    return {"jobs": tuple(jobs), "dead_jobs": len(catalogue.jobs.rows()) - len(alive)}


def _leftovers(layout: FolderLayout, rows: list[BlobRow]) -> dict[str, int]:
    """Count the abandoned fills, the evicted blobs and the files that the cache's records don't
    name."""
    known = {row.key for row in rows}
    dead_fills = strays = leftover_bytes = 0
    locks = layout.locks("readers")
    try:
        for folder in ("blobs", "fills", "trash", "unverified"):
            for name in layout.names(folder):
                is_stray = name.partition(".")[0] not in known
                if not is_stray and folder in ("blobs", "unverified"):
                    continue
                try:
                    stat = getattr(layout, folder).stat(name)
                except FileNotFoundError:
                    continue
                is_map = name.endswith(".map") and not is_stray  # counted with its fill
                if is_map or locks.is_held(stat.st_ino):
                    continue
                dead_fills += folder == "fills" and not is_stray
                strays += folder == "trash" or is_stray
                leftover_bytes += stat.st_blocks * 512
    finally:
        locks.close()
    return {"dead_fills": dead_fills, "strays": strays, "leftover_bytes": leftover_bytes}


PACKAGE = "penstock"
PACKAGE_HOME = Path(str(penstock.__file__)).resolve().parents[1]
"""The folder that holds our package: site-packages, or a checkout."""

_GIT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Namesake:
    """Another distribution with a package `penstock`. is_here: its files are in our folder."""

    distribution: str
    is_here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """The facts of our installed package.

    source: the list of our files, that of a "wheel" or of a git "checkout"; None if there is none.
    foreign: files in our folders that aren't ours. altered: files of a wheel that differ from the
    installed ones. Both are relative to the folder of the package. hiding: files that shadow our
    package for scripts in the current folder.
    """

    source: str | None = None
    foreign: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    namesakes: tuple[Namesake, ...] = ()
    hiding: tuple[str, ...] = ()


def package_facts(folder: Path, *, home: Path = PACKAGE_HOME) -> PackageFacts:
    """Collect the facts of the package in `home`, for a script that is started in `folder`."""
    hidden, namesakes = hiding(folder, home=home), _namesakes(home)
    recorded = _recorded(home)
    owned = _tracked(home) if recorded is None else frozenset(recorded)
    if owned is None:
        return PackageFacts(namesakes=namesakes, hiding=hidden)
    there = sorted(_files(home))
    return PackageFacts(
        source="checkout" if recorded is None else "wheel",
        foreign=tuple(name for name in there if name not in owned),
        altered=tuple(name for name in there if _is_altered(home / name, recorded, name)),
        namesakes=namesakes,
        hiding=hidden,
    )


def hiding(folder: Path, *, home: Path = PACKAGE_HOME) -> tuple[str, ...]:
    """Return the names in a folder that hide our package from a script started in it."""
    if folder.resolve() == home:
        return ()
    suffixes = machinery.all_suffixes()
    candidates = [folder / f"{PACKAGE}{suffix}" for suffix in suffixes]
    candidates += [folder / PACKAGE / f"__init__{suffix}" for suffix in suffixes]
    return tuple(str(path) for path in candidates if path.is_file())


def _folders(home: Path) -> tuple[str, ...]:
    """Return our folders: the package, and in a checkout the layers that it links to."""
    links = sorted(path for path in (home / PACKAGE).glob("*") if path.is_symlink())
    targets = (path.resolve() for path in links)
    return (PACKAGE, *(path.name for path in targets if path.parent == home and path.is_dir()))


def _files(home: Path) -> Iterator[str]:
    """Yield the files of our folders without compiled and hidden ones; a folder behind a link is
    one entry."""
    for top in _folders(home):
        for folder, names, files in os.walk(home / top):
            names[:] = [n for n in names if n != "__pycache__" and not n.startswith(".")]
            links = [name for name in names if os.path.islink(os.path.join(folder, name))]
            for name in (*files, *links):
                if not name.startswith("."):
                    yield (Path(folder) / name).relative_to(home).as_posix()


def _recorded(home: Path) -> Mapping[str, metadata.FileHash | None] | None:
    """Return the files of the distribution installed in `home`, with their checksums, or None."""
    marker = f"{PACKAGE}/__init__.py"
    for found in metadata.distributions(name=PACKAGE):
        files = {file.as_posix(): file.hash for file in found.files or ()}
        if marker in files and Path(str(found.locate_file(marker))).resolve() == home / marker:
            return files
    return None


def _tracked(home: Path) -> frozenset[str] | None:
    """Return the files of our folders that git tracks; None if that is unknown."""
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "ls-files", "-z", "--", *_folders(home)]
    try:
        run = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode != 0:
        return None
    return frozenset(os.fsdecode(name) for name in run.stdout.split(b"\0") if name)


def _is_altered(
    path: Path, recorded: Mapping[str, metadata.FileHash | None] | None, name: str
) -> bool:
    wanted = None if recorded is None else recorded.get(name)
    if wanted is None or wanted.mode not in hashlib.algorithms_available:
        return False
    try:
        digest = hashlib.new(wanted.mode, path.read_bytes()).digest()
    except OSError:
        return True
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted.value


def _namesakes(home: Path) -> tuple[Namesake, ...]:
    owners = metadata.packages_distributions().get(PACKAGE, ())
    return tuple(
        Namesake(distribution=owner, is_here=_is_here(owner, home))
        for owner in sorted(set(owners))
        if re.sub(r"[-_.]+", "-", owner).lower() != PACKAGE
    )


def _is_here(owner: str, home: Path) -> bool:
    found = metadata.distribution(owner)
    ours = home / PACKAGE
    return any(
        ours in Path(str(found.locate_file(file))).resolve().parents
        for file in found.files or ()
        if file.parts[0] == PACKAGE
    )


# Launchers by the variable that reveals them, in the order of World.detect.
_LAUNCHERS = (
    ("RANK", "torchrun"),
    ("WORLD_SIZE", "torchrun"),
    ("HOROVOD_RANK", "Horovod"),
    ("OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("MPI_LOCALRANKID", "MPICH or Intel MPI"),
    ("SLURM_STEP_ID", "srun"),
    ("PMI_RANK", "PMI"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """An installed module. version: None if it isn't installed; error: the reason why it can't be
    imported; cuda: the CUDA version of its build, None for a CPU build."""

    version: str | None = None
    error: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All facts that the doctor's checks use.

    dali_builds: names of the installed DALI distributions. decoded: True if DALI decoded a small
    JPEG; decode_error: the reason if it failed, None if it wasn't tried. gpu_devices: device files
    of GPUs. driver_cuda: newest CUDA version that the driver supports, such as (13, 0). cpus:
    processors of the machine; affinity: those of this process; usable: the same within quotas.
    omp_threads: OMP_NUM_THREADS; torch_threads: torch's threads for CPU operations. world: the
    World, or the reason why it is unknown. shm: (total, free) bytes of /dev/shm. open_files: (soft,
    hard) limit. cache: None if the folder isn't a cache. zarr: includes numcodecs.
    """

    python: tuple[int, int, int]
    system: str
    machine: str
    packages: PackageFacts
    torch: ModuleFacts
    dali: ModuleFacts
    dali_builds: tuple[str, ...]
    decoded: bool
    decode_error: str | None
    gpus: tuple[Gpu, ...]
    gpu_devices: int
    driver_cuda: tuple[int, int] | None
    cpus: int
    affinity: int
    usable: int
    omp_threads: str | None
    torch_threads: int | None
    world: World | str
    launcher: str | None
    slurm_batch: bool
    shm: tuple[int, int] | None
    open_files: tuple[int, int]
    folder: FolderFacts | None
    cache: CacheFacts | None = None
    zarr: ModuleFacts = ModuleFacts()


def gather(folder: Path | None = None) -> MachineFacts:
    """Collect the facts of this machine and process in some seconds: it imports torch and DALI."""
    torch_module, torch = _torch()
    dali_builds, dali = _dali()
    decoded, decode_error = _decode() if dali.version and not dali.error else (False, None)
    return MachineFacts(
        python=sys.version_info[:3],
        system=platform.system(),
        machine=platform.machine(),
        packages=package_facts(Path.cwd()),
        torch=torch_module,
        dali=dali,
        dali_builds=dali_builds,
        zarr=_zarr(),
        decoded=decoded,
        decode_error=decode_error,
        gpus=_gpus(torch),
        gpu_devices=len([p for p in glob.glob("/dev/nvidia*") if p[11:].isdigit()]),
        driver_cuda=_driver_cuda(),
        cpus=machine_cores(),
        affinity=len(allowed_cores()),
        usable=usable_cores(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        torch_threads=torch.get_num_threads() if torch else None,
        world=_world(),
        launcher=next((name for variable, name in _LAUNCHERS if variable in os.environ), None),
        slurm_batch="SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ,
        shm=_space("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        folder=folder_facts(folder) if folder else None,
        cache=cache_facts(folder) if folder else None,
    )


def _torch() -> tuple[ModuleFacts, Any]:
    version = _version("torch")
    try:
        torch = importlib.import_module("torch")
    # A broken installation can fail in any way; the reason is reported.
    except Exception as error:
        return ModuleFacts(version=version, error=_line(error)), None
    return ModuleFacts(version=torch.__version__, cuda=torch.version.cuda), torch


def _dali() -> tuple[tuple[str, ...], ModuleFacts]:
    names = (dist.metadata["Name"] for dist in metadata.distributions())
    builds = sorted({name for name in names if name and name.startswith("nvidia-dali-cuda")})
    if not builds:
        return (), ModuleFacts()
    version = _version(builds[0])
    match = re.search(r"cuda(\d+?)(\d)$", builds[0])
    cuda = f"{match[1]}.{match[2]}" if match else None
    try:
        importlib.import_module("nvidia.dali.fn")
    # As above: missing CUDA libraries, a wrong ABI, an incomplete installation.
    except Exception as error:
        return tuple(builds), ModuleFacts(version=version, error=_line(error), cuda=cuda)
    return tuple(builds), ModuleFacts(version=version, cuda=cuda)


def _zarr() -> ModuleFacts:
    version = _version("zarr")
    if version is None:
        return ModuleFacts()
    try:
        importlib.import_module("numcodecs")
        importlib.import_module("zarr")
    # As above.
    except Exception as error:
        return ModuleFacts(version=version, error=_line(error))
    return ModuleFacts(version=version)


def _decode() -> tuple[bool, str | None]:
    """Decode a small JPEG with DALI; return (success, reason of the failure)."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        return False, None
    buffer = io.BytesIO()
    image.new("RGB", (24, 16), (200, 100, 50)).save(buffer, "JPEG")
    try:
        verify = importlib.import_module("penstock.augment.verify").verify_images
        (fact,) = verify([np.frombuffer(buffer.getvalue(), np.uint8)], threads=1)
    # Any failure of DALI here would also end a training job.
    except Exception as error:
        return False, _line(error)
    reason = getattr(fact, "reason", None)
    return reason is None, reason


def _gpus(torch: Any) -> tuple[Gpu, ...]:
    if torch is None or torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(Gpu(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in found)


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


def _world() -> World | str:
    try:
        return World.detect()
    except PlanError as error:
        return str(error)


def _space(path: str) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
