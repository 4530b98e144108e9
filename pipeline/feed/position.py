"""Hold the position of a loader in its job: what its user has received so far.

No other object holds it, and a state is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.pipeline.plan import Cursor

if TYPE_CHECKING:
    from penstock.pipeline.plan import Step, Walk


@dataclass(frozen=True, slots=True)
class PassId:
    """Names one pass over what is left of an epoch: of all numbers the latest one may go on."""

    number: int
    epoch: int


class Position:
    """The one place that knows how far a loader's user is; a state is made from it.

    cursor: where the next batch begins: all before it was handed out, or skipped by the user.
    received: the end of the last batch that was handed out; None before the first one, and of a
        restored state. It stays where `go_to` leads elsewhere.
    asked_epoch: the latest epoch of which the user began a pass.
    is_restored: it came with a state or a step's number, and nothing was handed out since.

    It changes at these moments only, and on the thread that iterates the loader or calls it:
    `ask` and `begin_pass` as a pass begins, `hand_over` with each batch, `go_to` by set_epoch(),
    `move_to` by skip(), `restore` and `settle` by load_state_dict(), `end_passes` where the batches
    ahead are dropped for those of other options. What is read, decoded and filled ahead never
    changes it and counts nothing of its own: a batch's place is the step that it carries, and the
    next one's is that step's end. Of what is here, the other threads look at `asked_epoch` alone.
    """

    def __init__(self) -> None:
        self.cursor = Cursor(0, 0)
        self.received: Cursor | None = None
        self.asked_epoch = 0
        self.is_restored = False
        self._passes = 0

    @property
    def start(self) -> Cursor:
        """Where a pass begins: at the start of the epoch, or at the restored place."""
        return self.cursor if self.is_restored else Cursor(self.cursor.epoch, 0)

    @property
    def begins_epoch(self) -> bool:
        """Whether the next batch is the first of its epoch, or the first after another epoch's."""
        received = self.received
        elsewhere = received is not None and received.epoch != self.cursor.epoch
        return self.cursor.position == 0 or elsewhere

    def ask(self) -> Cursor:
        """Note that the user asks for a pass; the place where it will begin."""
        start = self.start
        self.asked_epoch = start.epoch
        return start

    def begin_pass(self) -> PassId:
        """Go to where a pass begins; the passes before it are over."""
        self.cursor = self.ask()
        self.end_passes()
        return PassId(self._passes, self.cursor.epoch)

    def end_passes(self) -> None:
        """Let no pass that has begun go on."""
        self._passes += 1

    def is_over(self, pass_id: PassId) -> bool:
        """Whether a pass has come to the end of its epoch."""
        return self.cursor.epoch != pass_id.epoch

    def check(self, pass_id: PassId) -> None:
        """Raise ConfigError unless this is the pass that may go on."""
        if pass_id.number != self._passes:
            raise ConfigError(
                "This iterator was overtaken: another iterator of the same loader was started, or "
                "the loader's position was set. Use one loader for each concurrent loop."
            )

    def hand_over(self, step: Step) -> None:
        """Move behind a batch, which is the user's from here on."""
        self.cursor = self.received = step.then
        self.is_restored = False

    def go_to(self, epoch: int) -> None:
        """Move to the start of an epoch. The current epoch again changes nothing."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch, 0)
            self.is_restored = False
            self.end_passes()

    def move_to(self, cursor: Cursor) -> None:
        """Move to where a step begins: a pass of its epoch goes on there, else the next one begins
        there."""
        self.cursor = cursor
        self.is_restored = True

    def restore(self, cursor: Cursor) -> None:
        """Move to where a state was saved."""
        self.cursor, self.received = cursor, None
        self.is_restored = True
        self.end_passes()

    def rejoin(self, cursor: Cursor) -> None:
        """Move to where the job goes on with other ranks. A pass that has begun goes on there, if
        that is in its epoch."""
        self.cursor, self.received = cursor, None
        self.is_restored = True

    def settle(self, walk: Walk) -> None:
        """Move on to the next epoch where the batch, now that it is known, leaves no step in this
        one."""
        self.cursor = walk.normalise(self.cursor)
