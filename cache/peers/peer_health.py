"""How long a peer is left alone that failed or gave wrong bytes: arithmetic, no clock."""

from __future__ import annotations

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 120.0
_WRONG_COUNTS = 4
"""An answer with wrong bytes weighs like so many in a row that failed, and isn't forgotten."""
_MOST_DOUBLINGS = 10


class PeerHealth:
    """Judges one peer by what became of requests to it. Not locked.

    Each failure in a row doubles its rest; an answer ends it. Wrong bytes are never made good.
    """

    def __init__(self) -> None:
        self._failures = self._wrong = 0
        self._rests_until_s = 0.0

    def rests(self, now_s: float) -> bool:
        """Whether it is left alone for now."""
        return now_s < self._rests_until_s

    def answered(self) -> None:
        """Note an answer, if only a no."""
        self._failures = 0

    def failed(self, now_s: float, *, is_wrong: bool = False) -> float:
        """Note a request without an answer, or with one that was wrong; seconds that it is left
        alone for."""
        # Of many that fail at one moment, one makes the rest longer.
        if self.rests(now_s) and not is_wrong:
            return self._rests_until_s - now_s
        self._failures += 1
        self._wrong += is_wrong
        doublings = min(self._failures - 1 + _WRONG_COUNTS * self._wrong, _MOST_DOUBLINGS)
        rest_s = min(_FIRST_REST_S * 2.0**doublings, _LONGEST_REST_S)
        self._rests_until_s = max(self._rests_until_s, now_s + rest_s)
        return self._rests_until_s - now_s
