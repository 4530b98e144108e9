"""What figures were measured on, and with which versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from penstock.cache.base.limits import machine_memory_bytes, usable_cores

_DISTRIBUTIONS = {
    "penstock": ("penstock",),
    "torch": ("torch",),
    "dali": ("nvidia-dali-cuda130", "nvidia-dali-cuda120"),
    "pillow": ("pillow",),
    "numpy": ("numpy",),
}


def machine() -> dict[str, Any]:
    """What the figures were measured on: cores that may be used, processor, memory, kernel."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cores": usable_cores(),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "memory_gib": round(machine_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(*distributions: str) -> dict[str, str]:
    """Python's version and those of the packages that matter, `distributions` among them; only the
    ones that are installed."""
    found = {"python": platform.python_version()}
    named = _DISTRIBUTIONS | {name: (name,) for name in distributions}
    for name, candidates in named.items():
        for distribution in candidates:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(distribution)
    return found
