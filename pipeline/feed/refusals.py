"""What a rank tells that can't go on as its user asked, so that nobody waits for it in vain.

A state that can't be loaded, or a loader that can't be made, is one rank's error, and its user may
go on all the same: with another state, or without one as all others do. So a refusal is withdrawn
when the rank comes after all, and ends the others only if it stands for a while.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import RankFailedError

if TYPE_CHECKING:
    from penstock.cache.job_store import JobStore
    from penstock.pipeline.plan.world import World

STANDS_AFTER_S = 3.0
"""A refusal that was seen and still stands so much later ends who waits: time for a second try."""

_MOST_HEARD = 64  # refusals that are looked at
_MOST_REASON = 2000  # characters that the other ranks are told


class Refusals:
    """Speaks of refusals with the ranks of one loader. Every method raises JobStoreError.

    was_refused: this rank was; then it goes by no other's, as where all were all go on alike.
    """

    def __init__(self, store: JobStore, world: World) -> None:
        """store: the loader's part of the job's."""
        self._store = store
        self._world = world
        self.was_refused = False
        self._seen: set[int] = set()

    def tell(self, reason: str) -> None:
        """Tell that this process was refused what its user asked."""
        self.was_refused = True
        told = {
            "process": self._world.process,
            "rank": self._world.rank,
            "label": self._world.label,
            "reason": reason[:_MOST_REASON],
        }
        self._store.tell(_key(self._store.add("refusals", 1)), json.dumps(told))

    def withdraw(self) -> None:
        """Tell that this process goes on after all."""
        for number, told in self._standing():
            if told.get("process") == self._world.process:
                self._store.tell(_key(number), "")

    def look(self) -> float | None:
        """Between two waits: how long the next one should be, None for any; 0 where a refusal stood
        for a while, so that waiting has no sense."""
        if self.was_refused:
            return None
        standing = {number for number, _ in self._standing()}
        if standing & self._seen:
            return 0.0
        self._seen = standing
        return STANDS_AFTER_S if standing else None

    def error(self) -> RankFailedError | None:
        """What a rank raises that waits, of the first refusal that `look` saw stand."""
        for number, told in self._standing():
            if number in self._seen and not self.was_refused:
                label = str(told.get("label", "another rank")).capitalize()
                return RankFailedError(
                    f"{label} was refused and hasn't come to its first batch, so every rank stops "
                    f"here: {told.get('reason')}",
                    rank=int(told.get("rank", 0)),
                )
        return None

    def _standing(self) -> list[tuple[int, dict[str, Any]]]:
        count = min(self._store.add("refusals", 0), _MOST_HEARD)
        told = ((number, self._store.heard(_key(number))) for number in range(1, count + 1))
        return [(number, json.loads(text)) for number, text in told if text]


def _key(number: int) -> str:
    return f"refusal-{number}"
