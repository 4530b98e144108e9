"""Hold the position of a loader in its job: how far its user has received batches.

No other object holds it, and states are made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import ConfigError
from penstock.pipeline.plan import Cursor

if TYPE_CHECKING:
    from penstock.pipeline.plan import Step, Walk


class PassId(NamedTuple):
    """The identity of one pass over the rest of an epoch. Only the latest pass may continue."""

    number: int
    epoch: int


class Position:
    """The only holder of a loader's position, from which states are made.

    cursor: the beginning of the next batch. Everything before it was delivered, or skipped by the
        user.
    received: the end of the last delivered batch; None before the first batch and after restoring a
        state. `set_epoch` doesn't change it.
    requested_epoch: the latest epoch of which the user began a pass.
    is_restored: True if the position came from a state or a step number and nothing has been
        delivered since.

    Only these methods change it, on the thread that iterates or calls the loader: `request_pass`
    and `begin_pass` when a pass begins, `deliver` with each batch, `set_epoch`, `skip_to` for
    skip(), `restore`, `rejoin` and `normalise`, and `end_passes` when batches in flight are dropped
    because the options changed. Reading, decoding and filling ahead never change it and count no
    position of their own: a batch carries its step, and the next batch begins where that step ends.
    Other threads read `requested_epoch` only.
    """

    def __init__(self) -> None:
        self.cursor = Cursor(0, 0)
        self.received: Cursor | None = None
        self.requested_epoch = 0
        self.is_restored = False
        self._passes = 0

    @property
    def start(self) -> Cursor:
        """The beginning of the next pass: the start of the epoch, or the restored position."""
        return self.cursor if self.is_restored else Cursor(self.cursor.epoch, 0)

    @property
    def begins_epoch(self) -> bool:
        """True if the next batch is the first of its epoch, or the first after another epoch."""
        received = self.received
        elsewhere = received is not None and received.epoch != self.cursor.epoch
        return self.cursor.position == 0 or elsewhere

    def request_pass(self) -> Cursor:
        """Record that the user requests a pass, and return where it will begin."""
        start = self.start
        self.requested_epoch = start.epoch
        return start

    def begin_pass(self) -> PassId:
        """Move to the beginning of a pass, and end the passes before it."""
        self.cursor = self.request_pass()
        self.end_passes()
        return PassId(self._passes, self.cursor.epoch)

    def end_passes(self) -> None:
        """End all passes that have begun."""
        self._passes += 1

    def is_over(self, pass_id: PassId) -> bool:
        """Return True if a pass has reached the end of its epoch."""
        return self.cursor.epoch != pass_id.epoch

    def check(self, pass_id: PassId) -> None:
        """Raise ConfigError unless the pass may continue."""
        if pass_id.number != self._passes:
            raise ConfigError(
                "This iterator was overtaken: another iterator of the same loader was started, or "
                "the loader's position was set. Use one loader for each concurrent loop."
            )

    def deliver(self, step: Step) -> None:
        """Move to the end of a step whose batch the user receives."""
        self.cursor = self.received = step.then
        self.is_restored = False

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch. The current epoch changes nothing."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch, 0)
            self.is_restored = False
            self.end_passes()

    def skip_to(self, cursor: Cursor) -> None:
        """Move to the beginning of a step.

        A pass over its epoch continues there; otherwise the next pass begins there.
        """
        self.cursor = cursor
        self.is_restored = True

    def restore(self, cursor: Cursor) -> None:
        """Move to the position of a state, and end all passes."""
        self.rejoin(cursor)
        self.end_passes()

    def rejoin(self, cursor: Cursor) -> None:
        """Move to the position at which the job continues with other ranks.

        A pass over its epoch continues there.
        """
        self.skip_to(cursor)
        self.received = None

    def normalise(self, walk: Walk) -> None:
        """Move to the next epoch if no step begins at the position, given the batch size."""
        self.cursor = walk.normalise(self.cursor)
