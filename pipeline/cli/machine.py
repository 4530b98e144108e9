"""What `penstock doctor` asks the machine. It only collects; `doctor` judges.

Everything that may be missing or broken here is an answer, never an error: a machine on which torch
doesn't import is just the one whose doctor must run to its end.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import io
import os
import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cache.base.limits import allowed_cores, machine_cores, usable_cores
from penstock.cache.errors import PlanError
from penstock.pipeline.cli.cache_facts import CacheFacts, cache_facts
from penstock.pipeline.cli.folder_facts import FolderFacts, folder_facts
from penstock.pipeline.cli.packages import PackageFacts, package_facts
from penstock.pipeline.plan.world import World

# By the variable that shows the launcher; in the order in which World.detect asks.
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
class Module:
    """An installed module. version: None if it isn't there; error: why it doesn't import; cuda: the
    CUDA version that it was built for, None for a build without."""

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
    """All that the doctor's checks look at.

    dali_builds: names of the installed DALI distributions.
    decoded: whether DALI decoded a small JPEG; decode_error: why not, None if it wasn't tried.
    gpu_devices: device files of GPUs. driver_cuda: newest CUDA version of the driver as (13, 0).
    cpus: processors of the machine; affinity: of them this process's; usable: after quotas.
    omp_threads: OMP_NUM_THREADS; torch_threads: what torch would start for CPU operations.
    world: or the reason why it isn't known. shm: (total, free) bytes of /dev/shm.
    open_files: (soft, hard) limit. cache: None if the folder isn't one. zarr: with numcodecs.
    """

    python: tuple[int, int, int]
    system: str
    machine: str
    packages: PackageFacts
    torch: Module
    dali: Module
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
    zarr: Module = Module()


def gather(folder: Path | None = None) -> MachineFacts:
    """The facts of this machine and process; takes seconds, since torch and DALI are loaded."""
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


def _torch() -> tuple[Module, Any]:
    version = _version("torch")
    try:
        torch = importlib.import_module("torch")
    # A broken install fails in any way; the reason is the answer.
    except Exception as error:
        return Module(version=version, error=_line(error)), None
    return Module(version=torch.__version__, cuda=torch.version.cuda), torch


def _dali() -> tuple[tuple[str, ...], Module]:
    names = (dist.metadata["Name"] for dist in metadata.distributions())
    builds = sorted({name for name in names if name and name.startswith("nvidia-dali-cuda")})
    if not builds:
        return (), Module()
    version = _version(builds[0])
    match = re.search(r"cuda(\d+?)(\d)$", builds[0])
    cuda = f"{match[1]}.{match[2]}" if match else None
    try:
        importlib.import_module("nvidia.dali.fn")
    # As above: missing CUDA libraries, an ABI that doesn't fit, half an install.
    except Exception as error:
        return tuple(builds), Module(version=version, error=_line(error), cuda=cuda)
    return tuple(builds), Module(version=version, cuda=cuda)


def _zarr() -> Module:
    version = _version("zarr")
    if version is None:
        return Module()
    try:
        importlib.import_module("numcodecs")
        importlib.import_module("zarr")
    # As above.
    except Exception as error:
        return Module(version=version, error=_line(error))
    return Module(version=version)


def _decode() -> tuple[bool, str | None]:
    """Decode a small JPEG with DALI: (whether it did, why not)."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        return False, None
    buffer = io.BytesIO()
    image.new("RGB", (24, 16), (200, 100, 50)).save(buffer, "JPEG")
    try:
        verify = importlib.import_module("penstock.augment.verify").verify_images
        (fact,) = verify([np.frombuffer(buffer.getvalue(), np.uint8)], threads=1)
    # Whatever stops DALI here would stop training.
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
    """Newest CUDA version that the driver runs (cuDriverGetVersion: 1000 * major + 10 * minor)."""
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
    """The first line of an error, with its kind."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
