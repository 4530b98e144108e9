"""What the engine for torch datasets asks of whoever speaks with the job's other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.foreign.setup import PassSetup
    from penstock.pipeline.report.meter import Meter

    JoinRanks = Callable[[PassSetup, Meter], "Ranks | None"]


class Ranks(Protocol):
    """One loader's place among the ranks of its job. The thread that iterates calls."""

    def begin_pass(self) -> None:
        """The user goes on, whatever was refused."""

    def ask(self, epoch: int) -> None:
        """A batch of an epoch is asked for. Raises what the other ranks told to stop for."""

    def count_batch(self, *, ended: int | None) -> None:
        """A batch is handed out. ended: the epoch whose last one it is."""

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one can't go on."""

    def compare_state(self, mark: Mark) -> None:
        """All ranks load a state now: the same. Raises PlanError."""

    def restart(self) -> None:
        """A state was loaded."""

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that wait for this one that a state was refused."""

    def close(self) -> None:
        """The loader is closed. Safe to call twice."""
