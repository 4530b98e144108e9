"""A body comes whole, however it is cut on its way and wherever it is read to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import RequestError
from penstock.cache.peers import PeerConnection
from penstock.cache.stores import Timeouts, request_origin
from tests.watchdog import PATIENCE_S

DATA = memoryview(np.random.default_rng(5).bytes(700_000))


@contextlib.contextmanager
def connected(*, silent_s: float = PATIENCE_S):
    """A connection to a peer, and the socket of that peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        origin = request_origin(f"http://{host}:{port}")
        sock = socket.create_connection((host, port))
        theirs, _ = listener.accept()
    limits = Timeouts(connect_s=1.0, read_s=silent_s, whole_s=PATIENCE_S)
    mine = PeerConnection(sock, origin, is_public=False, timeouts=limits)
    mine.watch()
    with theirs, contextlib.closing(mine):
        yield mine, theirs


SIZES = st.sampled_from([1, 100, 2**16, 2**18 - 1, 2**18, 2**18 + 1, 400_000])


@settings(max_examples=25)
@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_all_of_it_comes(sent: list[int], read: list[int]) -> None:
    with connected() as (mine, theirs):

        def send() -> None:
            at = 0
            for size in (*sent, len(DATA)):
                theirs.sendall(DATA[at : at + size])
                at += size

        sender = threading.Thread(target=send)
        sender.start()
        there, deadline_s = 0, time.monotonic() + PATIENCE_S
        for size in (*read, len(DATA)):
            room = memoryview(bytearray(min(size, len(DATA) - there)))
            following = len(DATA) - there - len(room)
            assert mine.receive_all(room, deadline_s, following=following) == len(room)
            assert room == DATA[there : there + len(room)]
            there += len(room)
        sender.join()
        theirs.sendall(b"next")
        head = memoryview(bytearray(100))
        assert mine.receive(head, deadline_s) == 4


def test_what_breaks_off_or_falls_silent_is_noticed() -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with connected() as (mine, theirs):
        theirs.sendall(DATA[:300_000])
        theirs.shutdown(socket.SHUT_WR)
        assert mine.receive_all(memoryview(bytearray(2**20)), deadline_s) == 300_000
    with connected(silent_s=0.05) as (mine, theirs):
        theirs.sendall(DATA[:300_000])
        with pytest.raises(RequestError, match="nothing came"):
            mine.receive_all(memoryview(bytearray(2**20)), deadline_s)
        with pytest.raises(RequestError, match="no complete answer"):
            mine.receive_all(memoryview(bytearray(2**20)), 0.0)
