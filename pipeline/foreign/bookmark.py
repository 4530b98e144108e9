"""Where a loader over a torch dataset stands, whatever passes over it are under way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.pipeline.foreign.mark import Mark

if TYPE_CHECKING:
    from penstock.pipeline.foreign.setup import PassSetup


class Bookmark:
    """The mark behind the latest batch of the loader's latest pass; older passes don't move it.

    mark: what was handed out. number: of the latest pass. source: what that one reads from: without
    workers it has the dataset's state. is_restored: the mark is of a state, and the next pass
    begins just there. has_begun: a batch was handed out, by whichever pass.
    """

    def __init__(self) -> None:
        self.mark = Mark()
        self.number = 0
        self.source: Any = None
        self.is_restored = False
        self.has_begun = False
        self._is_decided = False  # a state says what the epoch will be drawn from

    def open(self, setup: PassSetup) -> int:
        """Let a pass begin at the mark; its number.

        An epoch begins with nothing known of what it is drawn from: each pass draws its own. One
        that was left in the middle begins again, but where all that was promised came.
        """
        if not self.is_restored and not self._is_decided:
            if setup.is_counted_out(self.mark):
                self.mark = setup.after(self.mark)
            else:
                workers = () if self.mark.batches else self.mark.workers
                self.mark = Mark(epoch=self.mark.epoch, workers=workers)
        self.number += 1
        return self.number

    def began(self, number: int, mark: Mark, source: Any) -> None:
        """Note where the pass of a number stands, and what it reads from."""
        if number == self.number:
            self.mark, self.source = mark, source

    def moved(self, number: int, mark: Mark) -> None:
        """Note that the pass of a number handed a batch out, or that its epoch ended."""
        self.has_begun = True
        if number == self.number:
            self.mark = mark
            self.is_restored = self._is_decided = False

    def decide(self, mark: Mark) -> None:
        """Let the epoch that begins be drawn from what the mark says: a state promised so."""
        self.mark, self._is_decided = mark, True

    def go_to(self, epoch: int, setup: PassSetup) -> None:
        """Stand at the start of an epoch; nothing changes where that is the one under way."""
        is_counted_out = not self.is_restored and setup.is_counted_out(self.mark)
        if epoch != self.mark.epoch or is_counted_out:
            # Datasets of workers that go on have their states whatever the epoch's number is.
            self.mark = replace(setup.after(self.mark), epoch=epoch)
            self.is_restored = self._is_decided = False
            self.number += 1

    def restore(self, mark: Mark) -> None:
        """Stand where a state says."""
        self.mark = mark
        self.is_restored, self._is_decided = True, False
        self.number += 1
