"""What could be changed where batches wait for a user's function in the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.report.change import Change

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.report.facts import LoaderFacts

_STORE = (
    "store what it returns and read that in its place: a column of a table, or .npy files beside "
    "the data, then `penstock pack`"
)


def map_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where a Map is waited for, the first that is left to do."""
    found = facts.map
    assert found is not None
    share = min(1.0, found.seconds / facts.load_s) if facts.load_s else 1.0
    each_ms = 1e3 * found.seconds / max(facts.samples, 1)
    why = (
        f"{found.name} is {share:.0%} of the time that goes into reading: {each_ms:.2g} ms a sample"
    )
    cores = facts.usable_cores
    batched = "" if found.batched else ", batched=True if it can take many samples at once"
    if not found.processes:
        yield Change(
            cause="slow-map",
            why=f"{why}, in the reading threads.",
            advice=f"processes={max(2, cores)} would call it in processes of its own{batched}; or "
            f"{_STORE}.",
        )
    elif found.processes < cores:
        yield Change(
            cause="slow-map",
            why=f"{why}, by {found.processes} processes; {cores} cores are usable.",
            advice=f"processes={cores} would move it{batched}; or {_STORE}.",
            factor=cores / found.processes,
            basis=f"{cores} cores for {found.processes}",
            assumes="the function computes, and the cores are free",
        )
    else:
        yield Change(
            cause="slow-map",
            why=f"{why}, by {found.processes} processes on {cores} cores.",
            advice=f"Do it once{batched}: {_STORE}.",
        )
