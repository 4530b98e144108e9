"""Check the bounds of a trial of nodes, and collect the facts of its runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_job import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cluster_job import Cluster, Outcome


@dataclass(slots=True)
class Judge:
    """The bounds of a trial, and whether each held."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def at_most(self, what: str, got: float, most: float) -> None:
        """Record an upper bound."""
        self._note(what, got <= most, f"{got:.3f}, wanted at most {most:.3f}")

    def at_least(self, what: str, got: float, least: float) -> None:
        """Record a lower bound."""
        self._note(what, got >= least, f"{got:.3f}, wanted at least {least:.3f}")

    def holds(self, what: str, *, held: bool) -> None:
        """Record a condition."""
        self._note(what, held, "so" if held else "not so")

    def _note(self, what: str, held: bool, words: str) -> None:
        self.lines.append({"what": what, "pass": held, "got": words})
        print(f"   {'pass' if held else 'FAIL'}  {what}: {words}", flush=True)


def facts(job: Cluster, judge: Judge, runs: Sequence[Outcome]) -> dict[str, Any]:
    """Return the recorded facts of a job's runs and bounds."""
    return {
        "dataset_bytes": job.data_bytes,
        "load": load(),
        "runs": [
            {
                "name": run.name,
                "remote_share": run.remote_bytes / job.data_bytes,
                "statuses": run.statuses,
                "seconds": run.seconds,
            }
            for run in runs
        ],
        "judged": judge.lines,
    }
