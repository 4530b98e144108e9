"""Collating of samples by the user's function, with errors that name the sample to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Collate = Callable[[Any], Any]


def collate_named(collate: Collate, samples: Any, names: Sequence[Any]) -> Any:
    """What collate(samples) gives; an error gets a note that names the samples that it is about."""
    try:
        return collate(samples)
    except Exception as error:  # raised again, with the samples named
        culprit = _culprit(collate, samples) if len(names) == len(samples) else None
        if culprit is not None:
            place, why = culprit
            error.add_note(f"while collating: sample {names[place]!r} {why}")
        else:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            error.add_note(f"while collating the samples {listed}")
        raise


def _culprit(collate: Collate, samples: Any) -> tuple[int, str] | None:
    """The place of the one sample that can't be collated, alone or with the others, and which of
    the two; None where it isn't one, but all of them, or the function itself."""
    if not isinstance(samples, list):
        return None

    def works(*places: int) -> bool:
        try:
            collate([samples[place] for place in places])
        except Exception:  # whether it fails is the question
            return False
        return True

    alone = [works(place) for place in range(len(samples))]
    if not all(alone):
        first = alone.index(False)
        return (
            (first, "can't be collated: its type is the reason, or its content")
            if any(alone)
            else None
        )
    if len(samples) < 2 or not works(0, 0):  # a function that wants a batch of one size, say
        return None
    odd = [place for place in range(1, len(samples)) if not works(0, place)]
    if len(odd) == len(samples) - 1 > 1:  # the first goes with none: it, or none with any other
        odd = [0] if all(works(1, place) for place in range(2, len(samples))) else []
    why = "doesn't go with the others of its batch (their shapes, types or keys differ)"
    return (odd[0], why) if odd else None
