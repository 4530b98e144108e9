"""Deliveries of one call's ranges from several sources: each once, none behind the call's end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.outcomes import STALL_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.store import Answer


class Deliveries:
    """Passes answers on to a caller's `deliver` until the first of its exceptions, or the end.

    Safe for several threads. number: a range's place in the call.
    """

    def __init__(self, deliver: Callable[[int, Answer], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._active = 0
        self._keeping: set[int] = set()
        self._is_over = False
        self.error: BaseException | None = None

    def give(self, number: int, answer: Answer) -> None:
        """Deliver one answer; nothing where it was delivered or all is over. Raises what `deliver`
        raised, once it has."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                return
            self._done.add(number)
            # Nothing of another's may land behind what is delivered.
            self._settle(lambda: number not in self._keeping)
            self._active += 1
        try:
            self._deliver(number, answer)
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def keep(self, number: int, act: Callable[[], None]) -> None:
        """Do what keeps some bytes of a range that isn't delivered. Raises what that raises, and
        ClosedError where all is over."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._is_over or number in self._done:
                raise ClosedError("Others have brought what a peer was asked for.")
            self._active += 1
            self._keeping.add(number)
        try:
            act()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._changed:
                self._active -= 1
                self._keeping.discard(number)
                self._changed.notify_all()

    def end(self) -> None:
        """Deliver nothing more; returns when nothing is being delivered. Raises StalledError."""
        with self._changed:
            self._is_over = True
            self._settle(lambda: not self._active)

    def _settle(self, is_settled: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_settled, timeout=STALL_TIMEOUT_S):
            raise StalledError(
                f"Bytes that were fetched could not be stored for {STALL_TIMEOUT_S:.0f} s. The "
                "local disk may hang: try to list the cache folder."
            )

    def left(self, numbers: list[int]) -> list[int]:
        """Those of some ranges that weren't delivered."""
        with self._changed:
            return [number for number in numbers if number not in self._done]
