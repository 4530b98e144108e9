"""Read how many cores and how much memory the operating system lets this process use.

The control groups of a container allow less than the machine has: they throttle threads beyond the
quota and end a process that exceeds the memory limit. No other module counts cores or memory.

`trim_heap` returns freed memory to the system. Decoders allocate and free buffers of many sizes
from many threads, and glibc keeps what is freed in the middle of its heaps. Measured with DALI 2.4
on 2 threads, batch 128: 760 MiB resident after one epoch of 1,000 images and 1,008 MiB after ten;
trimmed at each epoch's end, 660 to 690 MiB throughout, for 10 to 50 ms an epoch. A fixed
M_MMAP_THRESHOLD has the same effect, but changes the allocator for the user's own tensors.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")
"""The default folder that holds /proc and /sys."""


def machine_cores() -> int:
    """Return the number of the machine's processors, at least 1, whether or not they are usable."""
    return os.cpu_count() or 1


def machine_memory_bytes() -> int:
    """Return the size of the machine's memory, whether or not it is usable."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_cores() -> list[int]:
    """Return the sorted numbers of the processors in this thread's CPU affinity."""
    return sorted(os.sched_getaffinity(0))


def usable_cores(*, root: Path | None = None) -> int:
    """Return the number of cores that the CPU affinity and CPU quota of this process allow.

    A quota is rounded down, because it would throttle another thread; the result is at least 1.
    Reads both versions of control groups; one that can't be read limits nothing. root: the folder
    that holds /proc and /sys.
    """
    quota = _least_quota(root or ROOT, int(time.monotonic()))
    return max(1, min(len(allowed_cores()), quota))


@functools.lru_cache(maxsize=1)
def _least_quota(root: Path, second: int) -> int:
    """Return the cores of the smallest quota. It is read once a second at most: a mixture opens
    thousands of datasets, each of which counts cores."""
    del second
    return min((int(cores) for cores in _quotas(root)), default=sys.maxsize)


def available_memory_bytes(*, root: Path | None = None) -> int:
    """Return how much more memory this process may use: the lower of the kernel's estimate for the
    machine and the rest of its control groups' limits, where droppable files count as free.

    Reads both versions of control groups; one that can't be read limits nothing. Returns 0 if the
    machine reports no estimate. root: the folder that holds /proc and /sys.
    """
    memory = _numbers(_read((root or ROOT) / "proc/meminfo").replace(":", "").replace(" kB", ""))
    machine = 1024 * memory.get("MemAvailable", 0)
    return max(0, min(machine, *_memory_left(root or ROOT), sys.maxsize))


def _memory_left(root: Path) -> Iterator[int]:
    """Yield the free bytes of this process's control group and of all its parents."""
    files = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for version, folder in _groups(root, "memory"):
        limit, usage, droppable = files[version]
        words = _read(folder / limit).strip(), _read(folder / usage).strip()
        if all(word.isdecimal() for word in words):
            files_bytes = _numbers(_read(folder / "memory.stat")).get(droppable, 0)
            yield int(words[0]) - int(words[1]) + files_bytes


def _numbers(text: str) -> dict[str, int]:
    """Parse lines of the form "name number"."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control group and of all its parents."""
    files = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
    for version, folder in _groups(root, "cpu"):
        # Quota and period in microseconds; "max" and -1 are no limit.
        words = " ".join(_read(folder / name) for name in files[version]).split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            yield int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version and the folder of this process's control group and of all its parents.

    In a container the path may be the host's and not exist below the mount; then only the mount
    point, which is the container's group, has readable files.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in {controllers, controller} if controllers else {""}:
            for depth in range(len(parts), -1, -1):
                folder = (root / "sys/fs/cgroup" / mount).joinpath(*parts[:depth])
                yield (1 if controllers else 2), folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def trim_heap() -> None:
    """Return free heap pages to the system; without glibc, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
