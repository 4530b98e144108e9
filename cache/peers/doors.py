"""Who may be connected: so many in all and from one address, and strangers go first.

A connection is a stranger's until a request on it was rightly signed. Where all places are taken,
the stranger who has been there longest loses his: whoever holds connections without a word is in
nobody's way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server grants. head_s: for a TLS handshake, and for a request from its first byte,
    or from the connection's beginning. idle_s: between requests. write_s: for each MiB that is
    sent."""

    connections: int = 512
    of_one_address: int = 256
    head_s: float = 10.0
    idle_s: float = 75.0
    write_s: float = 20.0


class Guest(Protocol):
    """A connection, as far as the doors know it."""

    @property
    def address(self) -> str: ...

    def abort(self) -> None:
        """End it at once; it leaves the doors."""


class Doors:
    """Counts who is connected. Pure: it decides, guests carry out."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._strangers: dict[Guest, None] = {}  # the longest there first
        self._known: set[Guest] = set()
        self._of: Counter[str] = Counter()

    def enter(self, guest: Guest) -> bool:
        """Whether a new connection may stay; an older stranger may have to go for it."""
        limits, address = self.limits, guest.address
        if self._of[address] >= limits.of_one_address:
            victim = next((one for one in self._strangers if one.address == address), None)
        elif self.count >= limits.connections:
            victim = next(iter(self._strangers), None)
        else:
            self._add(guest)
            return True
        if victim is None:
            return False
        self.leave(victim)
        victim.abort()
        self._add(guest)
        return True

    def _add(self, guest: Guest) -> None:
        self._strangers[guest] = None
        self._of[guest.address] += 1

    def know(self, guest: Guest) -> None:
        """Note that a guest is of the job."""
        if guest in self._strangers:
            del self._strangers[guest]
            self._known.add(guest)

    def leave(self, guest: Guest) -> None:
        """Note that a guest is gone. Safe to call twice."""
        if guest in self._strangers or guest in self._known:
            self._strangers.pop(guest, None)
            self._known.discard(guest)
            self._of[guest.address] -= 1
            if not self._of[guest.address]:
                del self._of[guest.address]

    @property
    def count(self) -> int:
        """How many are connected."""
        return len(self._strangers) + len(self._known)

    def clear(self) -> None:
        """Send all away."""
        for guest in [*self._strangers, *self._known]:
            guest.abort()
