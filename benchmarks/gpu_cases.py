"""Run cases for a GPU, each in a process of its own, so that a crash or a hang ends only that case.

Shared by the scripts for a GPU: the refusal without a GPU, the process of a case, the time limit of
all cases, and the record.
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
    """The answer of a case, or the reason why it has none ("" if it has one)."""

    told: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""

    def record(self) -> dict[str, Any]:
        return {"failed": self.failed} if self.failed else dict(self.told)


def has_cuda() -> bool:
    """Return True if torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def facts() -> dict[str, Any]:
    """Describe the GPU in the record; empty if a test runs without one."""
    return gpu_facts() if has_cuda() else {}


class Budget:
    """The seconds that all cases may take together; None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    def allows(self, seconds: float) -> float:
        """Return how many of so many seconds a case may take; 0 when the budget is used up."""
        if self._ends is None:
            return seconds
        return max(0.0, min(seconds, self._ends - time.monotonic()))


def ask(
    module: str, case: Mapping[str, Any], *, budget: Budget, timeout_s: float = CASE_S
) -> Answer:
    """Run `python -m module --case JSON` in a process of its own, which answers by
    `children.tell`."""
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
    """Report on stderr that nothing is measured without a GPU; return the exit code."""
    del arguments
    print(NOT_MEASURED, file=sys.stderr)
    return 1
