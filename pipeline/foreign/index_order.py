"""What an order of indices is: the requests of each pass, and where to go on behind a batch.

An order gives requests for one pass from a mark on, and knows how to go on behind it without
touching data: a plan by arithmetic, a sampler with state by its state, any other by drawing the
same indices again and skipping what was handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.foreign.faults import Substitutes
    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.foreign.worker import Request


class IndexOrder(Protocol):
    """The order in which a map-style dataset is read; holds nothing of a pass.

    name: what a resumed job must share.
    """

    @property
    def name(self) -> str: ...

    def decided(self, mark: Mark) -> Mark:
        """The mark with what the sampler will draw from decided now."""

    def begin(self, mark: Mark) -> PassRequests:
        """The requests of a pass from a mark on."""

    def substitutes(self, max_bad: float | None) -> Substitutes | None:
        """What stands in for bad samples; None where a bad sample is an error."""

    def steps(self) -> int | None:
        """Batches of a whole epoch on this rank, None if nobody knows."""

    def is_over(self, mark: Mark) -> bool:
        """Whether nothing is left of a mark's epoch, as far as anybody knows."""

    def last_samples(self) -> int | None:
        """Samples of an epoch's last batch that isn't whole; None if nobody knows."""


class PassRequests(Protocol):
    """The requests of one pass, and how a mark moves with each batch that was handed out."""

    mark: Mark  # where it starts; what it is drawn from may be decided until it does

    def __iter__(self) -> Iterator[Request]: ...
    def noted(self, mark: Mark) -> Mark: ...
    def moved(self, mark: Mark) -> Mark: ...
    def valid(self) -> NDArray[np.bool_] | None: ...
