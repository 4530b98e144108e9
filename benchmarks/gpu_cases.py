"""Cases for a GPU, each in a process of its own: one that crashes or hangs ends itself alone.

What the scripts for a GPU share: refusing where there is none, the case's process, the time that
all of them may take together, and the record.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_watch import gpu_facts
from penstock.pipeline.bench import HOME, MARK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_MEASURED = "not measured: no CUDA device"
CASE_S = 60.0  # importing, a CUDA context and a pack's first batches take a third of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a case told, or why it told nothing ("" if it did)."""

    told: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""

    def record(self) -> dict[str, Any]:
        return {"failed": self.failed} if self.failed else dict(self.told)


def has_cuda() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def facts() -> dict[str, Any]:
    """The GPU for the record; nothing where a test runs without one."""
    return gpu_facts() if has_cuda() else {}


class Budget:
    """Seconds that all cases may take together; None: any."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    def allows(self, seconds: float) -> float:
        """How many of so many seconds a case may take; 0 when it is over."""
        if self._ends is None:
            return seconds
        return max(0.0, min(seconds, self._ends - time.monotonic()))


def ask(
    module: str, case: Mapping[str, Any], *, budget: Budget, timeout_s: float = CASE_S
) -> Answer:
    """`python -m module --case JSON` in a process of its own; it answers by `children.tell`."""
    allowed = budget.allows(timeout_s)
    if not allowed:
        return Answer(failed="left out: the time is over")
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    try:
        done = subprocess.run(
            command, cwd=HOME, capture_output=True, text=True, timeout=allowed, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(failed=f"hung: no answer within {allowed:.0f} s")
    if done.returncode:
        return Answer(failed=_ended(done.returncode, done.stderr))
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not said:
        return Answer(failed="ended without an answer")
    return Answer(told=json.loads(said[-1].removeprefix(MARK)))


def _ended(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    known = {int(number): number.name for number in signal.Signals}
    return f"crashed by {known.get(-code, -code)}{last}" if code < 0 else f"failed{last}"


def refused(arguments: Sequence[str] | None = None) -> int:
    """Say on stderr that nothing is measured without a GPU; the exit code."""
    del arguments
    print(NOT_MEASURED, file=sys.stderr)
    return 1
