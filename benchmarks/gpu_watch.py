"""Describe the GPU, and measure its utilisation and that of its JPEG decoder with nvidia-smi."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Of nvidia-smi; older drivers know the first two only.
_QUERY = ("utilization.gpu", "utilization.memory", "utilization.jpeg", "utilization.decoder")
_EVERY_MS = 200


def known_fields() -> tuple[str, ...]:
    """Return the wanted fields that nvidia-smi knows here; none without it."""
    for fields in (_QUERY, _QUERY[:2]):
        with contextlib.suppress(FileNotFoundError):
            if not subprocess.run(_watching(fields), capture_output=True, check=False).returncode:
                return fields
    return ()


def _watching(fields: Sequence[str]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


@contextlib.contextmanager
def watched(fields: Sequence[str]) -> Iterator[dict[str, float]]:
    """Yield a dict that is filled, when the body ends, with the medians from nvidia-smi."""
    found: dict[str, float] = {}
    if not fields:
        yield found
        return
    watcher = subprocess.Popen(
        [*_watching(fields), f"--loop-ms={_EVERY_MS}"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield found
    finally:
        watcher.terminate()
        found.update(busy_medians(watcher.communicate()[0], fields))


def busy_medians(report: str, fields: Sequence[str] = _QUERY) -> dict[str, float]:
    """Return per cent by name from nvidia-smi's lines of comma-separated numbers, without fields
    that it can't report ("[N/A]"). Lines of other GPUs count too: run with one visible. Pure."""
    columns: dict[str, list[float]] = {}
    for line in report.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(fields):  # cut off
            continue
        for name, value in zip(fields, values, strict=True):
            with contextlib.suppress(ValueError):
                columns.setdefault(name.removeprefix("utilization."), []).append(float(value))
    return {name: statistics.median(values) for name, values in columns.items()}


def gpu_facts() -> dict[str, Any]:
    """Describe torch's current GPU."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
