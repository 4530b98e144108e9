"""A peer that answers by the protocol, or as a test scripts it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.cache.peers import Peer, PeerSecret, Question, check_token, protocol, prove_server
from tests.servers.scripted import Asked, ScriptedServer, Talk, scripted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = PeerSecret(b"0123456789abcdef" * 2)
GROUP = hashlib.sha256(b"set").hexdigest()[:32]


@dataclass
class FakePeer:
    """blobs: whole, by key. ahead_s: its clock. act: answers in its place where it isn't None and
    returns True. said: keys that it says it holds, None: those of its blobs."""

    server: ScriptedServer
    blobs: dict[str, bytes] = field(default_factory=dict)
    ahead_s: float = 0.0
    act: Callable[[Talk, Asked], bool] | None = None
    said: list[str] | None = None

    def peer(self, node: int) -> Peer:
        return Peer(node, self.server.url.removeprefix("http://"))

    def asked_for(self, path: str = "/v4/blobs/") -> int:
        """Return the number of its requests below a path."""
        return sum(asked.path.startswith(path) for asked in self.server.asked)

    def answer(self, talk: Talk, asked: Asked) -> None:
        if self.act is not None and self.act(talk, asked):
            return
        now_s = time.time() + self.ahead_s
        token = asked.headers.get("authorization", "")
        question = Question("GET", asked.target, asked.headers.get("range", ""))
        state = check_token(SECRET, question, token, now_s=now_s)
        if state != "valid":
            more = {"Date": protocol.date_text(now_s)}
            if state == "expired":
                more[protocol.PROOF_HEADER] = prove_server(SECRET, token, more["Date"])
            self._refuse(talk, more)
        elif asked.target == protocol.HELD:
            keys = list(self.blobs) if self.said is None else self.said
            talk.answer(200, protocol.held_keys(sorted(keys)))
        else:
            self._blob(talk, asked)

    def _refuse(self, talk: Talk, more: dict[str, str]) -> None:
        # Not by send_response, which has a Date of its own.
        lines = "".join(f"{name}: {text}\r\n" for name, text in more.items())
        talk.write(f"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n{lines}\r\n".encode())

    def _blob(self, talk: Talk, asked: Asked) -> None:
        key = protocol.key_of(asked.target)
        spans = protocol.ranges_of(asked.headers["range"])
        assert key is not None
        assert spans is not None
        whole = self.blobs.get(key)
        if whole is None:
            talk.answer(404)
        else:
            talk.answer(206, b"".join(whole[a:b] for a, b in spans), head_of(whole, *spans))


def head_of(whole: bytes, *spans: tuple[int, int]) -> dict[str, str]:
    """The headers of an answer 206."""
    return {
        "Content-Range": protocol.content_range(spans, len(whole)),
        protocol.CRC_HEADER: protocol.crcs_text(
            crc32c(whole[a:b]) for a, b in protocol.stretches(spans)
        ),
    }


@contextlib.contextmanager
def fake_peer(blobs: dict[str, bytes] | None = None) -> Iterator[FakePeer]:
    made: list[FakePeer] = []
    with scripted(lambda talk, asked: made[0].answer(talk, asked)) as server:
        made.append(FakePeer(server, blobs=blobs or {}))
        yield made[0]
