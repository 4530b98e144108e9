"""Find out why another node's server doesn't serve this node, and name the remedy.

A job that gets no answer from a peer uses another source. This module instead tries each stage of
the connection separately, so that it can name the one that fails. Each stage has a limit in bytes
and time. If this side uses TLS, the probe sends only one request unencrypted, without a token, to
find out if the other side uses plain HTTP. `fault_of` is pure.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from crc32c import crc32c

from penstock.cache.base import RequestError
from penstock.cache.peers import protocol
from penstock.cache.peers.trust import PeerSecret, Question, authorize, server_time
from penstock.cache.stores import parse_head

if TYPE_CHECKING:
    from collections.abc import Callable


_CONNECT_S, _HANDSHAKE_S, _ANSWER_S, _RANGE_S = 3.0, 5.0, 5.0, 10.0
_WHOLE_S = 28.0
"""Time limit of all requests to one server, because each of them may be slow."""
_REQUESTS, _REQUESTS_S = 9, 3.0
_END = b"\r\n\r\n"
_MOST_HEAD_BYTES = 16 * 2**10
_STEP = 2**18

SpokenProtocol = Literal["tls", "plain", "silence", "other"]
"""tls, plain: the protocols of peers. silence: the server accepts the connection, but sends
nothing. other: it sends something that no peer sends."""

Identity = Literal["same", "another", "unchecked"]
"""same: both sides have the same secret. another: they have different secrets. unchecked: this side
has no secret to check with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """The results of probing the server at an address.

    failure: the error of connecting, None if the connection was established. connect_s: seconds to
    connect. wants_tls: True if this side uses TLS. speaks: the protocol of the other side. tls: its
    TLS version, "" if unencrypted. identity: the result of comparing the two sides' secrets.
    ahead_s: seconds by which its clock is ahead of this node's. request_s: the median time of a
    small request, None if it wasn't measured or failed. size_bytes, range_s: the number of bytes
    fetched of a blob (0: it has no blobs, None: the request failed), and the seconds it took.
    """

    address: str
    failure: OSError | None = None
    connect_s: float = 0.0
    wants_tls: bool = False
    speaks: SpokenProtocol = "silence"
    tls: str = ""
    identity: Identity = "unchecked"
    ahead_s: float = 0.0
    request_s: float | None = None
    size_bytes: int | None = None
    range_s: float = 0.0


class ProbeSettings(NamedTuple):
    """The settings of requests to the probed server. secret: of the job, None if unknown. tls:
    returns the context of an encrypted connection; None if connections are plain."""

    secret: PeerSecret | None
    tls: Callable[[], ssl.SSLContext] | None


def probe(address: str, settings: ProbeSettings, *, measures: bool = True) -> PeerFacts:
    """Probe the server at "HOST:PORT". measures: measure its speed, too. Ends within half a minute,
    and raises no errors."""
    facts = PeerFacts(address=address, wants_tls=settings.tls is not None)
    began = time.monotonic()
    try:
        connection = _ProbeConnection(address, settings.secret)
    except OSError as error:
        return replace(facts, failure=error)
    facts = replace(facts, connect_s=time.monotonic() - began)
    with contextlib.closing(connection):
        try:
            if settings.tls is not None:
                facts = replace(facts, tls=connection.secure(settings.tls()))
            facts = _identify(connection, facts)
        except ssl.SSLCertVerificationError:
            identity: Identity = "unchecked" if settings.secret is None else "another"
            return replace(facts, speaks="tls", identity=identity)
        except (OSError, RequestError) as error:
            return _protocol(facts, error)
        if measures and facts.identity == "same":
            with contextlib.suppress(OSError, RequestError):
                facts = _measure(connection, facts)
    return facts


class _ProbeConnection:
    """A connection with time limits for each operation and for all of them.

    secret: signs the requests, if it isn't None. token: of the last request. ahead_s: seconds by
    which the server's clock is ahead, as far as is known. Raises OSError.
    """

    def __init__(self, address: str, secret: PeerSecret | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.secret, self.token, self.ahead_s = secret, "", 0.0
        self._address, self._host = address, host.strip("[]")
        self._end_s = time.monotonic() + _WHOLE_S
        self._sock = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext) -> str:
        """Start TLS, and return its version. Raises OSError."""
        self._sock = sock = context.wrap_socket(
            self._sock, server_hostname=self._host, do_handshake_on_connect=False
        )
        sock.settimeout(_HANDSHAKE_S)
        sock.do_handshake()
        return sock.version() or "TLS"

    def request(self, path: str, *, most: int = 0) -> tuple[int, dict[str, str], bytearray]:
        """Send a request; return the answer's status, its headers by lower-case name, and its body.
        most: the longest body that is accepted, in bytes. Raises OSError, RequestError."""
        self.token, question = "", Question("GET", path)
        if self.secret is not None:
            self.token = authorize(self.secret, question, now_s=time.time() + self.ahead_s)
        lines = [f"{name}: {value}\r\n" for name, value in question.headers(self.token).items()]
        head = f"GET {path} HTTP/1.1\r\nHost: {self._address}\r\n{''.join(lines)}\r\n"
        deadline_s = min(self._end_s, time.monotonic() + (_RANGE_S if most else _ANSWER_S))
        self._sock.settimeout(_left_s(deadline_s))
        self._sock.sendall(head.encode("ascii"))
        data = bytearray()
        while (begin := data.find(_END) + len(_END)) < len(_END):
            if len(data) > _MOST_HEAD_BYTES:
                raise RequestError("refused", "the head of the answer has no end")
            data += self._receive(deadline_s)
        try:
            status, headers = parse_head(data[: begin - len(_END)].decode("ascii"))
            size_bytes = int(headers.get("content-length", ""))
        except ValueError:
            raise RequestError("refused", "the answer isn't one of a peer") from None
        if not 0 <= size_bytes <= max(most, _MOST_HEAD_BYTES):
            raise RequestError("refused", "the answer has another length")
        while len(data) < begin + size_bytes:
            data += self._receive(deadline_s)
        return status, headers, data[begin : begin + size_bytes]

    def _receive(self, deadline_s: float) -> bytes:
        self._sock.settimeout(_left_s(deadline_s))
        if not (received := self._sock.recv(_STEP)):
            raise ConnectionResetError("the server ended the connection")
        return received

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def _left_s(deadline_s: float) -> float:
    if (left_s := deadline_s - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


# -- protocol and identity


def _protocol(facts: PeerFacts, error: OSError | RequestError) -> PeerFacts:
    """Find out which protocol the other side uses after a failure without a faulty certificate."""
    if not facts.tls:
        speaks_other = _speaks_plain if facts.wants_tls else _speaks_tls
        if speaks_other(facts.address):
            return replace(facts, speaks="plain" if facts.wants_tls else "tls")
    elif isinstance(error, OSError) and not isinstance(error, TimeoutError):
        # The server doesn't accept this side's certificate.
        return replace(facts, speaks="tls", identity="another")
    return replace(facts, speaks="silence" if isinstance(error, TimeoutError) else "other")


def _speaks_tls(address: str) -> bool:
    """Return True if the server presents a certificate in a TLS handshake, trusted or not."""
    try:
        with contextlib.closing(_ProbeConnection(address)) as connection:
            connection.secure(ssl.create_default_context())
    except ssl.SSLCertVerificationError:
        return True
    except OSError:
        return False
    return True


def _speaks_plain(address: str) -> bool:
    """Return True if the server answers an unencrypted request without a token as a peer does."""
    try:
        with contextlib.closing(_ProbeConnection(address)) as connection:
            return connection.request(protocol.ALIVE)[0] == 401
    except (OSError, RequestError):
        return False


def _identify(connection: _ProbeConnection, facts: PeerFacts) -> PeerFacts:
    """Compare the secrets by a signed request. Raises OSError, RequestError."""
    secret = connection.secret
    facts = replace(facts, speaks="tls" if facts.wants_tls else "plain")
    for _ in range(2):
        now_s = time.time()
        status, headers, body = connection.request(protocol.ALIVE)
        if status not in (200, 401) or body:
            raise RequestError("refused", f"status {status}")
        server_s = None if secret is None else server_time(secret, connection.token, headers)
        if server_s is None:
            if status == 200:
                raise RequestError("refused", "the answer has no proof")
            return replace(facts, identity="unchecked" if secret is None else "another")
        # A Date has whole seconds.
        connection.ahead_s = server_s + 0.5 - (now_s + time.time()) / 2
        if status == 200:
            return replace(facts, identity="same", ahead_s=connection.ahead_s)
    raise RequestError("refused", "the server refuses a token of its own time")


def _measure(connection: _ProbeConnection, facts: PeerFacts) -> PeerFacts:
    """Measure the time of small requests, and of a large one. Raises OSError, RequestError."""
    times_s: list[float] = []
    while len(times_s) < _REQUESTS and sum(times_s) < _REQUESTS_S:
        began = time.perf_counter()
        connection.request(protocol.ALIVE)
        times_s.append(time.perf_counter() - began)
    facts = replace(facts, request_s=sorted(times_s)[len(times_s) // 2])
    began = time.perf_counter()
    try:
        status, headers, found = connection.request(protocol.ANY, most=protocol.RANGE_BYTES)
    except (OSError, RequestError):
        return facts
    range_s = time.perf_counter() - began
    if status == 404:
        return replace(facts, size_bytes=0)
    body = memoryview(found)
    parts = protocol.stretches([(0, len(body))])
    crcs = protocol.crcs_of(headers, len(parts))
    if status != 206 or crcs != [crc32c(body[start:end]) for start, end in parts]:
        return facts
    return replace(facts, size_bytes=len(body), range_s=range_s)


PROTOCOL_NAMES = {"tls": "TLS", "plain": "plain HTTP"}
_NO_ROUTE = frozenset((
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES
))  # fmt: skip


class Fault(NamedTuple):
    """The stage at which a connection fails, what the probe found, and the remedy."""

    stage: str
    found: str
    remedy: str


def fault_of(facts: PeerFacts) -> Fault | None:
    """Return why a server doesn't serve this side; None if it does, or no fault was found."""
    if facts.failure is not None:
        return _connection_fault(facts, facts.failure)
    own: SpokenProtocol = "tls" if facts.wants_tls else "plain"
    if facts.speaks in PROTOCOL_NAMES and facts.speaks != own:
        return Fault(
            "speaks",
            f"it uses {PROTOCOL_NAMES[facts.speaks]}, but this side uses {PROTOCOL_NAMES[own]}",
            "Use the same setting on all nodes: tls=False in Peers(…) and --no-tls in commands, "
            "only on a private network. Loopback addresses (127.0.0.1) are plain by default.",
        )
    return _FAULTS.get(facts.speaks) or _FAULTS.get(facts.identity)


def _connection_fault(facts: PeerFacts, error: OSError) -> Fault:
    host, _, port = facts.address.rpartition(":")
    reason = error.strerror or error
    if isinstance(error, ConnectionRefusedError):
        found = "the machine answers, but nothing listens at this port"
        remedy = (
            "A node serves its cache while a job or a warm-up runs there, at the address in "
            "Peers(…) or --peers, or at another port that its log names if that one was taken. To "
            "test the connection before a job, run `penstock doctor --serve-peer "
            f"{facts.address} --peer-token-file FILE` on that node, then this command again. If a "
            "server runs there now, a firewall rejects the connection."
        )
    elif isinstance(error, socket.gaierror):
        found = f"the name {host} can't be resolved ({reason})"
        remedy = "Pass the IP address, or add the name to DNS or to /etc/hosts on each node."
    elif error.errno in _NO_ROUTE:
        found = f"no route to that machine ({reason})"
        remedy = (
            "Check that the machine is up and that both machines share a network. Some firewalls "
            f"answer in this way, too: open TCP port {port} between the nodes."
        )
    else:
        found = "no answer" if isinstance(error, TimeoutError) else f"no connection ({reason})"
        remedy = (
            f"Most often a firewall drops packets: open TCP port {port} between the nodes "
            "(security group, network policy, nftables). Otherwise the machine is down, or the "
            "address belongs to a network that this machine can't reach: the nodes of a job need "
            "a common network."
        )
    return Fault("peer", found, remedy)


_FAULTS = {
    "silence": Fault(
        "speaks",
        "it accepts the connection but sends no answer",
        "Check if that machine is overloaded, and if a load balancer or a proxy accepts "
        "connections in its place.",
    ),
    "other": Fault(
        "speaks",
        "its answer isn't that of a node",
        "Another program has that port: choose a port that is free on all nodes.",
    ),
    "another": Fault(
        "secret",
        "it has another secret",
        "Copy one token file to all nodes. If they have it, another job's server has the port, and "
        "this job's server listens at another one, which its log names: give both jobs the same "
        "token file, or each a separate port.",
    ),
}
"""The faults by `PeerFacts.speaks` and `PeerFacts.identity`."""
