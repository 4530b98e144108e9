"""The doctor judges what is installed: Python, torch, DALI, decoding, Zarr, GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.check import Check, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.machine import MachineFacts

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)
OLDEST_ZARR = (3, 0, 8)


def software_checks(facts: MachineFacts) -> Iterator[Check]:
    """Judge torch, DALI and what they can do here."""
    yield _torch(facts)
    yield _dali(facts)
    yield _decoding(facts)
    yield _zarr(facts)
    yield _gpu(facts)


def python_check(facts: MachineFacts) -> Check:
    """Judge the interpreter and the system that it runs on."""
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
            found=f"{found}, though {count(facts.gpu_devices, 'GPU')} stands in /dev",
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


def _decoding(facts: MachineFacts) -> Check:
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


def _zarr(facts: MachineFacts) -> Check:
    zarr, install = facts.zarr, "pip install -U 'penstock[zarr]'"
    if zarr.version is None:  # few need it
        found = f"not installed; datasets in Zarr need it: {install}"
        return Check(name="zarr", status="ok", found=found)
    if zarr.error is not None:
        found = f"{zarr.version}, but doesn't import: {zarr.error}"
        return Check(name="zarr", status="warn", found=found, remedy=install)
    if _numbers(zarr.version) < OLDEST_ZARR:
        wanted = ".".join(map(str, OLDEST_ZARR))
        found = f"{zarr.version}: codecs that Penstock doesn't know itself need {wanted} or newer"
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
    """The extra whose DALI fits the driver; CUDA 13's where there is none, as CPU decoding does."""
    return "cuda12" if facts.driver_cuda and facts.driver_cuda[0] < 13 else "dali"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
