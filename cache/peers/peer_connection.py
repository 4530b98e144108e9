"""A connection to a peer. On a plain one the kernel waits, with its own limit of time.

So a MiB of an answer is one system call, behind which its thread is woken once, and not one for
each part that comes. What is encrypted OpenSSL reads as it comes.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

from penstock.cache.stores.web_connection import Connection

if TYPE_CHECKING:
    from penstock.cache.stores.web_address import WebOrigin
    from penstock.cache.stores.web_connection import Timeouts

_LEAST_S = 0.001  # none at all would be no limit
_AT_ONCE = 2**18
"""So many bytes wake who waits for more than that. Measured with ranges of 1 MiB: a third less CPU
time of both sides than where each part that comes does."""


class PeerConnection(Connection):
    """As `Connection`; on a plain one the deadline is looked at between calls, each of which
    silence ends."""

    def __init__(
        self, sock: socket.socket, origin: WebOrigin, *, is_public: bool, timeouts: Timeouts
    ) -> None:
        super().__init__(sock, origin, is_public=is_public, timeouts=timeouts)
        self._is_plain = origin.scheme == "http"
        self._at_once, self._patience_s = 1, 0.0

    def watch(self) -> None:
        """As `Connection.watch`; from here on the kernel keeps the time."""
        super().watch()
        if self._is_plain:
            seconds = max(self.timeouts.read_s, _LEAST_S)
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.sock.setsockopt(socket.SOL_SOCKET, option, limit)
            self.sock.settimeout(None)

    def limit(self, deadline_s: float) -> None:
        """As `Connection.limit`."""
        if self._is_plain and time.monotonic() < deadline_s:
            return
        patience_s = self.timeouts.patience_s(deadline_s)
        if patience_s != self._patience_s:  # a system call, and encrypted bytes come 16 KiB a call
            self.sock.settimeout(patience_s)
            self._patience_s = patience_s

    def receive_all(self, room: memoryview, deadline_s: float, *, following: int = 0) -> int:
        """As `Connection.receive_all`."""
        if not self._is_plain:
            return super().receive_all(room, deadline_s, following=following)
        # In front of the answer's last bytes, which would be waited for to no end.
        first = room[: max(0, len(room) + following - _AT_ONCE)]
        there = self._receive(first, deadline_s, _AT_ONCE)
        if there < len(first):
            return there
        return there + self._receive(room[there:], deadline_s, 1)

    def _receive(self, room: memoryview, deadline_s: float, at_once: int) -> int:
        """Fill a room. at_once: fewer bytes wake nobody."""
        if room and at_once != self._at_once:
            with self.explaining():
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)
            self._at_once = at_once
        there = 0
        while there < len(room) and (
            got := self.receive(room[there:], deadline_s, flags=socket.MSG_WAITALL)
        ):
            there += got
        return there
