"""When peers are asked what they hold: before the first range, and again behind misses."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import TYPE_CHECKING

from penstock.cache.errors import PenstockError, PenstockWarning
from penstock.cache.fetch.object_range import ObjectRange
from penstock.cache.peers.peer_store import list_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.fetch.fetcher import Fetcher
    from penstock.cache.outcomes import Outcome
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.threads import Workers

_FIRST_S = 4.0
"""So long the first ranges wait for what peers say they hold."""
_AGAIN_S, _SOON_S = 10.0, 2.0
"""Lists are asked for again behind so long: short ones sooner, as they cost little."""
_SHORT = 100_000  # blobs in all of them
_MOST = 64
"""Peers that are asked at a time."""
_SHOWN = 5  # of those that don't answer
_NO_ANSWER = (
    f"no answer within {_FIRST_S:.0f} s. Check the address, that the job runs there, and that no "
    "firewall is in between: `penstock doctor --peer ADDRESS` tries each stage."
)


class PeerLists:
    """Keeps a directory's lists of what peers hold. Safe for several threads.

    pool: asks beside the threads that read.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        fetcher: Fetcher,
        pool: Workers,
        *,
        look: Callable[[], Sequence[Peer] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """look: who is there by now, asked before lists are asked for again."""
        self._look = look
        self._directory, self._fetcher, self._pool = directory, fetcher, pool
        self._clock = clock
        self._first: Outcome[None] | None = None
        self._wait_until_s = 0.0
        self._due_s = 0.0
        self._has_missed = self._has_warned = False

    def missed(self) -> None:
        """Note that a range had to be fetched from the remote: somebody may hold more by now."""
        self._has_missed = True

    def hear(self) -> None:
        """Have the lists asked for where that is due; the first time wait for them, a while."""
        now_s = self._clock()
        if self._first is None:
            self._due_s, self._wait_until_s = now_s + _SOON_S, now_s + _FIRST_S
            self._first = self._pool.submit(self._ask, None)
        elif self._has_missed and now_s >= self._due_s:
            self._due_s, self._has_missed = now_s + self._again_s, False
            self._pool.submit(self._look_and_ask, None)
        if not self._first.done():
            self._first.wait(self._wait_until_s - now_s)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_silence()

    @property
    def _again_s(self) -> float:
        share = min(1.0, self._directory.told_blobs / _SHORT)
        return _SOON_S + share * (_AGAIN_S - _SOON_S)

    def _warn_of_silence(self) -> None:
        directory = self._directory
        silent = [peer for peer in directory.peers[:_MOST] if not directory.has_heard(peer)]
        reasons: dict[str, list[Peer]] = {}
        for peer in silent:
            reasons.setdefault(directory.fault(peer) or _NO_ANSWER, []).append(peer)
        for reason, peers in reasons.items():
            shown = ", ".join(f"node {one.node} ({one.address})" for one in peers[:_SHOWN])
            more = f" and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else ""
            held = "they hold" if len(peers) > 1 else "it holds"
            warnings.warn(
                f"peers: {shown}{more}: {reason} As long as that is so, what {held} comes from the "
                "remote.",
                PenstockWarning,
                stacklevel=2,
            )

    def _look_and_ask(self, _: None) -> None:
        peers = None if self._look is None else self._look()
        if peers is not None:
            self._directory.know(peers)
        self._ask(None)

    def _ask(self, _: None) -> None:
        due = self._directory.unheard(self._clock(), older_s=self._again_s / 2, most=_MOST)
        wanted = [ObjectRange(path=list_name(peer), start=0, end=1, version=None) for peer in due]
        with contextlib.suppress(PenstockError):  # closed, or late; who is asked notes the rest
            self._fetcher.fetch(wanted, lambda *_: None)
