"""Find out why another node's server doesn't serve this one, and name the remedy.

A job that can't fetch from a peer only falls back to another source. This module tries each stage
of the connection separately, within a limit of bytes and time, so that it can name the stage that
failed. If TLS is wanted, it sends nothing unencrypted except one request without a token, which
shows whether the other side uses plain HTTP. Deriving a fault from the facts is pure.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from crc32c import crc32c

from penstock.cache.base import RequestError
from penstock.cache.peers import protocol
from penstock.cache.peers.tokens import Question, authorize, server_time
from penstock.cache.stores import parse_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.peers.protocol import Span
    from penstock.cache.peers.tokens import PeerSecret

RANGE_BYTES = 2**24
_CONNECT_S, _HANDSHAKE_S, _ANSWER_S, _RANGE_S = 3.0, 5.0, 5.0, 10.0
_WHOLE_S = 28.0
"""Limit for all requests to one server, because each of them may be slow."""
_REQUESTS, _REQUESTS_S = 9, 3.0
_END = b"\r\n\r\n"
_MOST_HEAD_BYTES = 16 * 2**10
_STEP = 2**12
# OpenSSL's codes for invalid certificates.
_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64

SpokenProtocol = Literal["tls", "plain", "silence", "other"]
"""tls, plain: a peer's protocol. silence: a connection without an answer. other: neither."""

Welcome = Literal["same", "another", "unchecked", "name", "clock"]
"""same: both sides have the same secret. another: they have different secrets or certificates.
unchecked: this side has no secret to compare. name: the certificate is for another address. clock:
the certificate isn't valid yet, or has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """The facts about the server at an address.

    failure: the error of the connection, None if it succeeded. connect_s: time to connect.
    wants_tls: this side would use TLS. speech: protocol of the other side. tls: its version of TLS.
    welcome: result of comparing the secrets. ahead_s: seconds by which its clock is ahead of this
    one. request_s: median time of a small request. size_bytes, range_s: size and time of a fetched
    range; 0 bytes if the server holds no blob, None if the fetch failed.
    """

    address: str
    failure: OSError | None = None
    connect_s: float = 0.0
    wants_tls: bool = False
    speech: SpokenProtocol = "silence"
    tls: str = ""
    welcome: Welcome = "unchecked"
    ahead_s: float = 0.0
    request_s: float | None = None
    size_bytes: int | None = None
    range_s: float = 0.0


class ProbeSettings(NamedTuple):
    """The settings of requests to servers. secret: None if unknown. tls: makes the context of an
    encrypted connection; None for plain HTTP."""

    secret: PeerSecret | None
    tls: Callable[[], ssl.SSLContext] | None


def probe(address: str, asking: ProbeSettings, *, measures: bool = True) -> PeerFacts:
    """Collect the facts about the server at "HOST:PORT", within half a minute.

    measures: also measure its speed. Raises only the errors of invalid TLS files."""
    facts = PeerFacts(address=address, wants_tls=asking.tls is not None)
    began = time.monotonic()
    try:
        line = _ProbeConnection(address)
    except OSError as error:
        return replace(facts, failure=error)
    facts = replace(facts, connect_s=time.monotonic() - began)
    with contextlib.closing(line):
        if asking.tls is None:
            facts = _plain(line, facts, asking)
        else:
            facts = _encrypted(line, facts, asking, asking.tls())
        if measures and facts.welcome == "same":
            with contextlib.suppress(OSError, RequestError):
                facts = _measured(line, facts, asking)
    return facts


class _ProbeConnection:
    """A connection with a time limit for each operation. Raises OSError."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._host = address, host.strip("[]")
        self._end_s = time.monotonic() + _WHOLE_S
        self._sock = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext) -> str:
        """Switch to TLS and return its version. Raises OSError."""
        self._sock = sock = context.wrap_socket(
            self._sock, server_hostname=self._host, do_handshake_on_connect=False
        )
        deadline_s = time.monotonic() + _HANDSHAKE_S
        sock.setblocking(False)
        while True:
            try:
                sock.do_handshake()
                return sock.version() or "TLS"
            except ssl.SSLWantReadError:
                select.select([sock], [], [], _left(deadline_s))
            except ssl.SSLWantWriteError:
                select.select([], [sock], [], _left(deadline_s))

    def ask(self, question: Question, token: str, *, most: int = 0) -> tuple[int, _ProbeAnswer]:
        """Send a request; return the status and the rest of the answer. most: maximum size of its
        body. Raises OSError, RequestError."""
        signed = f"Authorization: {token}\r\n" if token else ""
        ranged = f"Range: {question.range}\r\n" if question.range else ""
        asked = f"GET {question.path} HTTP/1.1\r\nHost: {self.address}\r\n{signed}{ranged}\r\n"
        deadline_s = min(self._end_s, time.monotonic() + (_RANGE_S if most else _ANSWER_S))
        self._sock.settimeout(_left(deadline_s))
        self._sock.sendall(asked.encode("ascii"))
        data = bytearray()
        while (at := data.find(_END)) < 0:
            if len(data) > _MOST_HEAD_BYTES:
                raise RequestError("refused", "no head of an answer")
            data += self._read(deadline_s)
        try:
            status, headers = parse_head(data[:at].decode("ascii"))
            size_bytes = int(headers.get("content-length", ""))
        except ValueError:
            raise RequestError("refused", "no answer of a peer") from None
        if not 0 <= size_bytes <= max(most, _MOST_HEAD_BYTES):
            raise RequestError("refused", "an answer of another length")
        body = bytearray(size_bytes)
        begun = data[at + len(_END) :][:size_bytes]
        body[: len(begun)] = begun
        left = memoryview(body)[len(begun) :]
        while left:
            self._sock.settimeout(_left(deadline_s))
            if not (count := self._sock.recv_into(left)):
                raise ConnectionResetError("the server ended the connection")
            left = left[count:]
        return status, _ProbeAnswer(headers, body)

    def _read(self, deadline_s: float) -> bytes:
        self._sock.settimeout(_left(deadline_s))
        if not (data := self._sock.recv(_STEP)):
            raise ConnectionResetError("the server ended the connection")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class _ProbeAnswer(NamedTuple):
    """The headers and the body of an answer."""

    headers: dict[str, str]
    body: bytearray

    def head(self, name: str) -> str:
        return self.headers.get(name.lower(), "")


def _left(deadline_s: float) -> float:
    if (left_s := deadline_s - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


# -- protocol and secret


def _plain(line: _ProbeConnection, facts: PeerFacts, asking: ProbeSettings) -> PeerFacts:
    try:
        return _greeted(line, replace(facts, speech="plain"), asking)
    except (TimeoutError, RequestError) as error:
        speech: SpokenProtocol = "silence" if isinstance(error, TimeoutError) else "other"
        return replace(facts, speech=speech)
    except OSError:  # a TLS server's answer to anything that isn't a handshake
        return replace(facts, speech="tls" if _speaks_tls(facts.address) else "other")


def _speaks_tls(address: str) -> bool:
    """Return True if a TLS handshake reaches a certificate, from any authority."""
    try:
        with contextlib.closing(_ProbeConnection(address)) as line:
            line.secure(ssl.create_default_context())
    except ssl.SSLCertVerificationError:
        return True
    except OSError:
        return False
    return True


def _encrypted(
    line: _ProbeConnection, facts: PeerFacts, asking: ProbeSettings, context: ssl.SSLContext
) -> PeerFacts:
    try:
        facts = replace(facts, tls=line.secure(context), speech="tls")
    except ssl.SSLCertVerificationError as error:
        return replace(facts, speech="tls", welcome=_mistrust(error, asking))
    except OSError as error:  # a plain peer takes the handshake for a request and waits for its end
        if _speaks_plain(facts.address):
            return replace(facts, speech="plain")
        return replace(facts, speech="silence" if isinstance(error, TimeoutError) else "other")
    try:
        return _greeted(line, facts, asking)
    except TimeoutError:
        return replace(facts, speech="silence")
    except RequestError:
        return replace(facts, speech="other")
    except OSError:  # it doesn't accept this side's certificate
        return replace(facts, welcome="another")


def _speaks_plain(address: str) -> bool:
    """Return True if it answers a request without a token in plain HTTP, as a peer does."""
    try:
        with contextlib.closing(_ProbeConnection(address)) as line:
            return line.ask(Question("GET", protocol.ALIVE), "")[0] == 401
    except (OSError, RequestError):
        return False


def _mistrust(error: ssl.SSLCertVerificationError, asking: ProbeSettings) -> Welcome:
    if asking.secret is None:
        return "unchecked"
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return "name"
    return "clock" if error.verify_code in (_NOT_YET, _EXPIRED) else "another"


def _greeted(line: _ProbeConnection, facts: PeerFacts, asking: ProbeSettings) -> PeerFacts:
    """Compare the secrets by a signed request. Raises OSError, RequestError."""
    question = Question("GET", protocol.ALIVE)
    ahead_s = 0.0
    for _ in range(2):
        now_s = time.time()
        token = (
            ""
            if asking.secret is None
            else authorize(asking.secret, question, now_s=now_s + ahead_s)
        )
        status, heard = line.ask(question, token)
        if status not in (200, 401) or heard.body:
            raise RequestError("refused", f"status {status}")
        told_s = None
        if asking.secret is not None:
            proof = heard.head(protocol.PROOF_HEADER)
            told_s = server_time(asking.secret, token, heard.head("Date"), proof)
        if told_s is None:
            if status == 200:
                raise RequestError("refused", "no proof")
            welcome: Welcome = "unchecked" if asking.secret is None else "another"
            return replace(facts, welcome=welcome)
        ahead_s = told_s + 0.5 - (now_s + time.time()) / 2  # a Date has whole seconds
        if status == 200:
            return replace(facts, welcome="same", ahead_s=ahead_s)
    raise RequestError("refused", "it rejects its own time")


# -- speed


def _measured(line: _ProbeConnection, facts: PeerFacts, asking: ProbeSettings) -> PeerFacts:
    """Measure the times of small requests and of a large range. Raises OSError, RequestError."""
    assert asking.secret is not None

    def signed(question: Question) -> str:
        assert asking.secret is not None
        return authorize(asking.secret, question, now_s=time.time() + facts.ahead_s)

    taken: list[float] = []
    while len(taken) < _REQUESTS and sum(taken) < _REQUESTS_S:
        question = Question("GET", protocol.ALIVE)
        token, began = signed(question), time.perf_counter()
        line.ask(question, token)
        taken.append(time.perf_counter() - began)
    facts = replace(facts, request_s=sorted(taken)[len(taken) // 2])
    span: Span = (0, RANGE_BYTES)
    for _ in range(2):
        question = Question("GET", protocol.ANY, protocol.ranges_text([span]))
        token, began = signed(question), time.perf_counter()
        try:
            status, heard = line.ask(question, token, most=RANGE_BYTES)
        except (OSError, RequestError):
            return facts
        range_s = time.perf_counter() - began
        if status == 404:
            return replace(facts, size_bytes=0)
        there = protocol.held_part(heard.headers) if status == 416 else None
        if there is not None and 0 < there[0] < RANGE_BYTES:
            span = (0, there[0])
            continue
        if status != 206 or not _is_right(heard, span):
            return facts
        return replace(facts, size_bytes=len(heard.body), range_s=range_s)
    return facts


def _is_right(heard: _ProbeAnswer, span: Span) -> bool:
    """Return True if an answer has the bytes of the range, with the right checksums."""
    parts = protocol.stretches([span])
    crcs = protocol.crcs_of(heard.headers, len(parts))
    body = memoryview(heard.body)
    start = span[0]
    return len(body) == span[1] - start and crcs == [
        crc32c(body[low - start : high - start]) for low, high in parts
    ]


PROTOCOL_NAMES = {"tls": "TLS", "plain": "plain HTTP"}
_NO_ROUTE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES}
)


class Fault(NamedTuple):
    """The stage at which a connection fails, the finding, and the remedy."""

    stage: str
    found: str
    remedy: str


def fault_of(facts: PeerFacts) -> Fault | None:
    """Return the fault of the connection; None if there is none, or if it can't be determined."""
    if facts.failure is not None:
        return _unreached(facts, facts.failure)
    return _speech(facts) or _secret(facts)


def _unreached(facts: PeerFacts, error: OSError) -> Fault:
    host, _, port = facts.address.rpartition(":")
    if isinstance(error, ConnectionRefusedError):
        return Fault(
            "peer",
            "the machine answers, but nothing listens at this port",
            "A node serves while a job or a warm-up runs there, at the address in Peers(…) or "
            "--peers; if that port was in use, at another one that its log names. To test the "
            f"connection before a job, run penstock doctor --serve-peer {facts.address} "
            "--peer-token-file FILE on that node, then this command again. If the node serves now, "
            "a firewall rejects connections.",
        )
    if isinstance(error, socket.gaierror):
        return Fault(
            "peer",
            f"the name {host} can't be resolved ({error.strerror})",
            "Pass the numeric address, or add the name to DNS or to /etc/hosts of each node.",
        )
    if error.errno in _NO_ROUTE:
        return Fault(
            "peer",
            f"no route to that machine ({error.strerror})",
            "Check that it runs and that both machines have a network in common. Some firewalls "
            f"also answer like this: open TCP port {port} between the nodes.",
        )
    silent = isinstance(error, TimeoutError)
    return Fault(
        "peer",
        "no answer" if silent else f"no connection ({error.strerror or error})",
        f"Most often a firewall drops the packets: open TCP port {port} between the nodes "
        "(security group, network policy, nftables). Otherwise the machine is down, or the address "
        "belongs to a network that this machine can't reach: a job's nodes need one in common.",
    )


def _speech(facts: PeerFacts) -> Fault | None:
    theirs, ours = (
        PROTOCOL_NAMES.get(facts.speech),
        PROTOCOL_NAMES["tls" if facts.wants_tls else "plain"],
    )
    if theirs is None:
        silent = facts.speech == "silence"
        return Fault(
            "speaks",
            "it accepts the connection but sends no answer"
            if silent
            else "its answer isn't that of a node",
            "Check if that machine is overloaded, or if a load balancer or proxy between the nodes "
            "accepts its connections."
            if silent
            else "Another program has that port: choose one that is free on all nodes.",
        )
    if theirs == ours:
        return None
    return Fault(
        "speaks",
        f"it uses {theirs}, but this side uses {ours}",
        "Use the same setting on all nodes: tls=False in Peers(…) and --no-tls in commands only if "
        "the network is private. By default the machine's own addresses (127.0.0.1) use plain "
        "HTTP.",
    )


def _secret(facts: PeerFacts) -> Fault | None:
    if facts.welcome in ("same", "unchecked"):
        return None
    if facts.welcome == "name":
        return Fault(
            "secret",
            "its certificate is for another address",
            "Use exactly the address that the node has in Peers(…) or --peers.",
        )
    if facts.welcome == "clock":
        return Fault(
            "secret",
            "its certificate isn't valid today",
            "Set the clocks of both machines (NTP), or renew your own certificates.",
        )
    return Fault(
        "secret",
        "it has another secret (or certificates of another authority)",
        "Copy one token file to all nodes. If they all have it, another job's server has the port, "
        "and this job's server listens at another one, which its log names: give both jobs one "
        "token file, or each its own port.",
    )
