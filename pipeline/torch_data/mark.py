"""Mark how far a pass over a torch dataset has come, and from which states its order was drawn.

Requests go to torch's workers, and their messages move the mark. A mark holds the states that
datasets, their iterators and samplers return of themselves (`owner_states`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.pipeline.plan import Cursor, damaged
from penstock.pipeline.torch_data.owner_states import copy_of
from penstock.pipeline.torch_data.random_states import NAMES, check_frozen
from penstock.pipeline.torch_private import pinned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.pipeline.plan import Ints

Ending = Literal["ended", "left"]
"""How the pass before ended: at its end, or left in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A request to a worker.

    index: indices of a batch's samples, or one index without batches. epoch: of all, or of each,
    int64. occurrences: of each (`Occurrences`); None is zeros. restore: a dataset state that the
    worker loads first. void: requests nothing; it only moves the next request to the next worker.
    """

    index: Any = None
    epoch: int | Ints = 0
    occurrences: Ints | None = None
    restore: dict[str, Any] | None = None
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """How far one worker's stream has been delivered.

    batches: delivered of it in this epoch. state: the dataset's, behind the last of these except
    `since`; None if it has none or none was read yet (then `since` equals `batches`). over: the
    stream has ended in this epoch. past: the state is from the end of the pass before, which ended
    or was left; the next epoch begins behind it. rng: without any state, the states of those of the
    process's generators that the stream drew from, at its start, or at its end if it is over.
    """

    batches: int = 0
    since: int = 0
    state: dict[str, Any] | None = None
    over: bool = False
    past: Ending | None = None
    rng: dict[str, str] | None = None

    def check(self) -> None:
        """Raise ValueError for an impossible position."""
        if self.past not in (None, "ended", "left"):
            raise ValueError(f"past is {self.past!r}")
        if any(type(count) is not int or count < 0 for count in (self.batches, self.since)):
            raise ValueError(f"counts are {(self.batches, self.since)}")

    def after(
        self, batches: int, *, state: dict[str, Any] | None, over: bool, rng: dict[str, str] | None
    ) -> WorkerPosition:
        """Return the position behind some more batches. state: None if it wasn't read this time."""
        count = self.batches + batches
        if state is not None:
            return WorkerPosition(batches=count, state=state, over=over)
        if not over and rng is None:
            rng = self.rng
        return replace(self, batches=count, since=self.since + batches, over=over, rng=rng)

    def next_epoch(self) -> WorkerPosition:
        """Return the position at the start of the next epoch, in a persistent worker."""
        if self.over:
            return WorkerPosition(state=self.state, past="ended", rng=self.rng)
        return WorkerPosition(state=self.state, past="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """A message from a worker: a batch with what is needed to continue behind it, or a position
    alone.

    ids: of the samples: their indices; in a stream, their positions among all workers' streams.
    epochs, occurrences: of each, of the request; None if all are of the pass's epoch. position: of
    the worker behind this message; a map-style dataset's has its state alone; None if there is
    none. void: it has no batch. bad: rows whose own samples are bad: their indices, and why; ids
    are then those of the substitutes. error: to raise instead of a batch.
    """

    batch: Any = None
    samples: int = 0
    ids: Any = ()
    epochs: Ints | None = None
    occurrences: Ints | None = None
    worker: int = 0
    position: WorkerPosition | None = None
    void: bool = False
    bad: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    error: Exception | None = None

    def pin_memory(self) -> WorkerMessage:
        """Return this message with its batch in pinned memory; torch's pinning thread calls
        this."""
        return replace(self, batch=pinned(self.batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The position of a pass: what was delivered of an epoch, and what its order was drawn from.

    batches: delivered on this rank. position: samples of the epoch over all ranks (plans only).
    base_seed: torch's, of the workers. sampler_seed, rng, python_rng, numpy_rng, generator: what
    the sampler drew from: a seed, or the states of torch's, python's and numpy's generators, or of
    the user's. mixed: the one of them whose draws can't be repeated. sampler: its own state.
    sampler_epoch, dataset_epoch: of a sampler or an iterable dataset with set_epoch. workers:
    positions of torch's workers (one without workers). next_worker: the worker of the next batch.
    bad: samples of the epoch that were replaced before the state was taken, over all ranks.
    """

    epoch: int = 0
    batches: int = 0
    position: int = 0
    base_seed: int | None = None
    sampler_seed: int | None = None
    rng: str | None = None
    python_rng: str | None = None
    numpy_rng: str | None = None
    mixed: str | None = None
    generator: str | None = None
    sampler: Any = None
    sampler_epoch: int | None = None
    dataset_epoch: int | None = None
    workers: tuple[WorkerPosition, ...] = field(default=())
    next_worker: int = 0
    bad: int = 0

    @property
    def cursor(self) -> Cursor:
        """The beginning of the next batch in a plan."""
        return Cursor(self.epoch, self.position)

    def to_dict(self) -> dict[str, Any]:
        """Return the mark as JSON types, except for states of the user's own dataset and
        sampler."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "workers"}
        kept = {name: copy_of(value) for name, value in own.items() if value is not None}
        names = WorkerPosition.__slots__
        workers = [{name: copy_of(getattr(each, name)) for name in names} for each in self.workers]
        return {**kept, "workers": workers}

    @classmethod
    def from_dict(cls, values: Any) -> Mark:
        """Return the mark of a `to_dict`; raises ResumeError for values that it can't have
        written."""
        try:
            given = copy_of(dict(values))
            workers = tuple(WorkerPosition(**worker) for worker in given.pop("workers"))
            mark = cls(workers=workers, **given)
            for worker in workers:
                worker.check()
            counts = (mark.epoch, mark.batches, mark.position, mark.next_worker, mark.bad)
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError(f"counts are {counts}")
            frozen = {name: getattr(mark, name) for name in NAMES}
            own = {"rng": mark.generator}
            for states in (frozen, own, *(worker.rng or {} for worker in workers)):
                check_frozen(states)
        except (TypeError, ValueError, KeyError) as error:
            raise damaged(error) from error
        return mark
