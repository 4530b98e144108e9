"""Count what the parts of a mixture deliver, and find the part whose data is slow to read.

Samples and epochs of the parts follow from the plan at the loader's position, so nothing is counted
for them. Bytes and reading times come with each batch. Jobs without mixtures never import this
module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import counter, format_size, gauge
from penstock.pipeline.report.run_facts import PartFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers import MixtureContents
    from penstock.readers.fieldtypes import PartLoads

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatistics:
    """The counts of one part of a mixture. Samples, tokens and epochs are those of all ranks since
    the job's start, at this loader's position; all others are of this rank since the loader was
    built."""

    samples: int = counter("samples of the part that the job has consumed, on all ranks")
    epochs: float = gauge("the part's own epochs that the job has consumed")
    tokens: int | None = counter(
        "tokens of these samples, if all have the same number", default=None
    )
    bad: int = counter("bad samples of the part, on this rank")
    bytes: int = counter("encoded bytes of the part that this rank read for its batches")
    load_s: float = counter(
        "wall-clock time of this rank's reading threads for the part, waits for the store included",
        default=0.0,
    )

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f" ({self.tokens:,} tokens)"
        bad = f", {self.bad:,} bad" if self.bad else ""
        return (
            f"{self.samples:,} samples{tokens}, {self.epochs:.3g} epochs, "
            f"{format_size(self.bytes)} in {self.load_s:.1f} s{bad}"
        )


class PartMeter:
    """The counters of a mixture's parts. The thread that delivers writes them.

    consumed: returns the samples of each part before the loader's position, int64, shape (parts,).
    tokens: of each sample of a part; None if that is unknown or differs.
    """

    def __init__(
        self,
        mixture: MixtureContents,
        *,
        consumed: Callable[[], Ints],
        tokens: Sequence[int | None],
    ) -> None:
        self._names, self._sizes = mixture.names, mixture.sizes
        self._consumed, self._tokens = consumed, tokens
        self._first_id = np.cumsum([0, *(part.id_end for part in mixture.parts[:-1])])
        parts = len(mixture.names)
        self._bad = np.zeros(parts, np.int64)
        # One value, as other threads read it: the counts, without the latest reads, and these.
        self._counted: tuple[NDArray[np.float64], list[PartLoads]] = np.zeros((parts, 3)), []

    def take_over(self, other: PartMeter) -> None:
        """Continue the counts of another meter of the same parts, which counts no more."""
        self._counted, self._bad = other._counted, other._bad

    def count(self, loads: PartLoads) -> None:
        """Count the reads of a delivered batch."""
        latest = self._counted[1]
        # Batches that were read together share amounts.
        if latest and (last := latest[-1]).amounts is loads.amounts:
            latest[-1] = last._replace(share=last.share + loads.share)
        elif len(latest) < _MOST_LATEST:
            latest.append(loads)
        else:
            self._counted = self._amounts, [loads]

    @property
    def _amounts(self) -> NDArray[np.float64]:
        """The samples, bytes and seconds of each part, float64, shape (parts, 3)."""
        counted, latest = self._counted
        amounts = counted.copy()
        if some := [*latest]:
            every = [each.amounts * each.share for each in some]
            np.add.at(amounts, np.concatenate([each.parts for each in some]), np.concatenate(every))
        return amounts

    def count_bad(self, ids: Iterable[int]) -> None:
        """Count bad samples by their ids."""
        np.add.at(self._bad, np.searchsorted(self._first_id, [*ids], side="right") - 1, 1)

    def table(self) -> Mapping[str, PartStatistics]:
        """Return the counts of each part by its name, as of now."""
        consumed, bad, amounts = (
            each.tolist() for each in (self._consumed(), self._bad, self._amounts)
        )
        return {
            name: PartStatistics(
                samples=consumed[number],
                epochs=consumed[number] / int(self._sizes[number]),
                tokens=None if each is None else each * consumed[number],
                bad=bad[number],
                bytes=round(amounts[number][1]),
                load_s=amounts[number][2],
            )
            for number, (name, each) in enumerate(zip(self._names, self._tokens, strict=True))
        }

    def slowest(self) -> PartFacts | None:
        """Return the part that took most of the reading time; None before the first read."""
        samples, _, load_s = self._amounts.T
        if not load_s.any() or not samples.any():
            return None
        number = int(np.argmax(load_s))
        return PartFacts(
            name=self._names[number],
            load_share=float(load_s[number] / load_s.sum()),
            sample_share=float(samples[number] / samples.sum()),
        )


_MOST_LATEST = 64  # reads that are counted together
