"""Marks: where a pass over a torch dataset stands, and what its order was drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ResumeError
from penstock.pipeline.foreign.dataset_state import copy_of
from penstock.pipeline.foreign.generators import NAMES, check_frozen

if TYPE_CHECKING:
    from penstock.pipeline.foreign.worker import Ending, WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPosition:
    """How far one worker's stream has been handed out.

    batches: handed out of it in this epoch. state: the dataset's behind the last of these but
    `since`; None if it has none or none was taken yet (then `since` equals `batches`). over:
    nothing more comes of it in this epoch. past: the state is of the pass before, which ended or
    was left there; the epoch begins anew behind it. rng: without any state, of the process's
    generators those that the stream drew from, as they were at its start, or if it is over now.
    """

    batches: int = 0
    since: int = 0
    state: dict[str, Any] | None = None
    over: bool = False
    past: Ending | None = None
    rng: dict[str, str] | None = None

    def check(self) -> None:
        """Raise ValueError for what no worker's stream can be at."""
        if self.past not in (None, "ended", "left"):
            raise ValueError(f"past is {self.past!r}")
        if any(type(count) is not int or count < 0 for count in (self.batches, self.since)):
            raise ValueError(f"counts are {(self.batches, self.since)}")

    def moved(self, message: WorkerMessage) -> WorkerPosition:
        """The position behind one batch more."""
        if message.state is not None:
            return WorkerPosition(batches=self.batches + 1, state=message.state, over=message.over)
        return replace(
            self,
            batches=self.batches + 1,
            since=self.since + 1,
            over=message.over,
            rng=message.rng if message.over or message.rng is not None else self.rng,
        )

    def noted(self, message: WorkerMessage) -> WorkerPosition:
        """The position with what a worker said between two batches."""
        if message.past is not None:
            return WorkerPosition(state=message.state, past=message.past, rng=message.rng)
        if not message.over:
            return self
        if message.state is None:
            return replace(self, over=True, rng=message.rng)
        return WorkerPosition(batches=self.batches, state=message.state, over=True)

    def next_epoch(self) -> WorkerPosition:
        """The position at the start of the next epoch, in a worker that goes on."""
        if self.over:
            return WorkerPosition(state=self.state, past="ended", rng=self.rng)
        return WorkerPosition(state=self.state, past="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a pass stands: what of an epoch was handed out, and what its order was drawn from.

    batches: handed out on this rank. position: samples of the epoch over all ranks (plans only).
    base_seed: torch's, of the workers. sampler_seed, rng, python_rng, numpy_rng, generator: what
    the sampler drew from: a seed, the states of torch's, python's and numpy's generators, or of
    the user's; mixed: that of them which can't be repeated. sampler: its own state.
    sampler_epoch, dataset_epoch: of a sampler or an iterable dataset with set_epoch. workers: of
    each torch worker (one without workers); next_worker: whose batch is due. bad: samples of the
    epoch that others stood in for.
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

    def to_dict(self) -> dict[str, Any]:
        """The mark in JSON types, but for states of the user's own dataset and sampler."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "workers"}
        kept = {name: value for name, value in values.items() if value is not None}
        return {
            **copy_of(kept),
            "workers": [
                {each.name: copy_of(getattr(worker, each.name)) for each in fields(worker)}
                for worker in self.workers
            ],
        }

    @classmethod
    def from_dict(cls, values: Any) -> Mark:
        """The mark behind `to_dict`; raises ResumeError for what that can't have written."""
        try:
            given = copy_of(dict(values))
            workers = tuple(WorkerPosition(**worker) for worker in given.pop("workers"))
            mark = cls(workers=workers, **given)
            for worker in workers:
                worker.check()
            counts = (mark.epoch, mark.batches, mark.position, mark.next_worker, mark.bad)
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError(f"counts are {counts}")
        except (TypeError, ValueError, KeyError) as error:
            raise ResumeError(
                f"State is damaged ({error}). Start from an older checkpoint."
            ) from error
        for frozen in (
            {name: getattr(mark, name) for name in NAMES},
            *(worker.rng for worker in mark.workers if worker.rng is not None),
        ):
            check_frozen(frozen)
        return mark
