"""What could be changed for each limit, by the figures of the run.

Where one of the changes of a stage comes from something out of the ordinary, the diagnosis names
that as the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.report.change import Change
from penstock.pipeline.report.decode_changes import augment_changes, decode_changes
from penstock.pipeline.report.map_changes import map_changes
from penstock.pipeline.report.read_changes import (
    cache_changes,
    disk_changes,
    peer_changes,
    remote_changes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.report.causes import Limit
    from penstock.pipeline.report.facts import LoaderFacts


def changes_for(limit: Limit, facts: LoaderFacts) -> list[Change]:
    """What could be changed, one at least. limit: not "nothing yet"."""
    return list(_CHANGES[limit](facts))


def _model(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="slow-model",
        advice="A faster input side would change nothing.",
        removes=True,
        assumes="the model takes no time",
    )


def _python(facts: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="gil",
        why=f"It holds Python's GIL: {facts.gil_late:.0%} of the reading threads' tries to take it "
        f"came late, by {facts.gil_late_s * 1e3:.1f} ms.",
        advice="Move what computes in Python between two batches to a process of its own, or to "
        "native code that lets the GIL go.",
        removes=True,
        assumes="the training loop takes no time",
        is_anomaly=True,
    )


def _dataset(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="dataset-code",
        advice="More num_workers=, or a native dataset (`penstock pack`), whose images "
        "DALI decodes, would move it.",
    )


def _copy(_: LoaderFacts) -> Iterator[Change]:
    yield Change(
        cause="slow-copy",
        advice="Smaller images (`penstock pack --short-side`) have fewer bytes to copy.",
    )


_CHANGES: dict[Limit, Callable[[LoaderFacts], Iterator[Change]]] = {
    "model": _model,
    "python": _python,
    "copy": _copy,
    "augment": augment_changes,
    "decode": decode_changes,
    "dataset": _dataset,
    "map": map_changes,
    "disk": disk_changes,
    "remote": remote_changes,
    "peers": peer_changes,
    "cache": cache_changes,
}
