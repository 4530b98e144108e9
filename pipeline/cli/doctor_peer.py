"""`penstock doctor --peer`: does this machine reach other nodes' servers, and is it let in there.

`peer_checks` is a pure function of what `cache.peers.probe` found.
"""

from __future__ import annotations

import errno
import math
import socket
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.pipeline.cli.check import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cache.base.peer_settings import Peers
    from penstock.cache.peers.probe import Asking, PeerFacts
    from penstock.cache.peers.tokens import PeerSecret

AT_ONCE = 16
SLOW_BYTES_PER_S = 50e6
LEAST_RATED_BYTES = 2**20  # of less the request's own time is most
SLOW_REQUEST_S = 0.05
FAR_CLOCK_S = 60.0
_SOON_S = 2.0  # what a Date of whole seconds and a request's time leave open

_SPEECH = {"tls": "TLS", "plain": "plain HTTP"}
_NO_ROUTE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES}
)


def secret_of(settings: Peers) -> PeerSecret | None:
    """What the nodes share, if it is told here. Raises ConfigError."""
    from penstock.cache.peers.peer_secret import job_secret
    from penstock.pipeline.plan.world import peer_token

    token = peer_token()
    if settings.token_file is None and token is None:
        return None
    return job_secret(settings, None, token)


def peer_facts(settings: Sequence[Peers]) -> list[PeerFacts]:
    """Ask all of these servers, many at a time. Raises ConfigError, MissingDependencyError."""
    from penstock.cache.peers.probe import probe
    from penstock.cache.threads import ordered

    if unasked := [one.address for one in settings if not one.port]:
        raise ConfigError(
            f"--peer {unasked[0]}: got port 0, wanted the one at which that node listens: that of "
            "Peers(…) or --peers there, or what --serve-peer said."
        )
    asked = [(one.address, _asking(one)) for one in settings]
    return list(
        ordered(lambda one: probe(*one), asked, workers=AT_ONCE, ahead=AT_ONCE, name="doctor")
    )


def _asking(settings: Peers) -> Asking:
    import ssl

    from penstock.cache.peers.certificates import credentials_of, is_loopback
    from penstock.cache.peers.probe import Asking

    secret = secret_of(settings)
    if secret is None:  # no certificate of the job's: who speaks TLS shows one that isn't known
        plain = settings.tls is False or (settings.tls is None and is_loopback(settings.host))
        return Asking(None, None if plain else ssl.create_default_context)
    credentials = credentials_of(settings, secret)
    return Asking(secret, None if credentials is None else credentials.client_context)


# -- judging


def peer_checks(facts: PeerFacts) -> Iterator[Check]:
    """Judge the way to a server, in the order in which its faults would show."""
    if facts.failure is not None:
        yield _unreached(facts, facts.failure)
        return
    found = f"{facts.address}: reached in {_time(facts.connect_s)}"
    yield Check(name="peer", status="ok", found=found)
    yield _speech(facts)
    if facts.speech not in _SPEECH or facts.wants_tls != (facts.speech == "tls"):
        return
    yield _secret(facts)
    if facts.welcome == "same":
        yield _clock(facts)
        yield _requests(facts)
        yield _rate(facts)


def _failed(facts: PeerFacts, name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="fail", found=f"{facts.address}: {found}", remedy=remedy)


def _unreached(facts: PeerFacts, error: OSError) -> Check:
    host, _, port = facts.address.rpartition(":")
    if isinstance(error, ConnectionRefusedError):
        return _failed(
            facts,
            "peer",
            "that machine answers, but nothing listens at this port",
            "A node serves while a job or a warm-up runs there, at the address in Peers(…) or "
            "--peers; where the port was taken, at another that its log names. To try the way "
            f"before a job: penstock doctor --serve-peer {facts.address} --peer-token-file FILE on "
            "that node, then this again. If it serves now, a firewall refuses.",
        )
    if isinstance(error, socket.gaierror):
        return _failed(
            facts,
            "peer",
            f"nobody knows the name {host} ({error.strerror})",
            "Pass the address in numbers, or put the name into DNS or /etc/hosts of each node.",
        )
    if error.errno in _NO_ROUTE:
        return _failed(
            facts,
            "peer",
            f"there is no way to that machine ({error.strerror})",
            f"Is it up, and in a network of this one's? Some firewalls answer so, too: open TCP "
            f"port {port} between the nodes.",
        )
    silent = isinstance(error, TimeoutError)
    return _failed(
        facts,
        "peer",
        "no answer" if silent else f"no connection ({error.strerror or error})",
        f"Most often a firewall that drops packets: open TCP port {port} between the nodes "
        "(security group, network policy, nftables). Else the machine is down, or the address is "
        "of a network that this one doesn't reach: a job's nodes need one in common.",
    )


def _speech(facts: PeerFacts) -> Check:
    theirs, ours = _SPEECH.get(facts.speech), _SPEECH["tls" if facts.wants_tls else "plain"]
    if theirs is None:
        silent = facts.speech == "silence"
        return _failed(
            facts,
            "speaks",
            "it takes the connection and says nothing" if silent else "nothing that a node says",
            "Is that machine overloaded, or does something between the nodes take connections for "
            "it (a load balancer, a proxy)?"
            if silent
            else "Another program has that port: give the nodes one that is free on all of them.",
        )
    if theirs == ours:
        return Check(name="speaks", status="ok", found=f"{facts.address}: {facts.tls or theirs}")
    return _failed(
        facts,
        "speaks",
        f"{theirs}, and this side would speak {ours}",
        "Say the same on all nodes: tls=False in Peers(…), --no-tls in commands, only where the "
        "network is private. Addresses of the machine itself (127.0.0.1) are plain unless told.",
    )


def _secret(facts: PeerFacts) -> Check:
    if facts.welcome == "same":
        return Check(name="secret", status="ok", found=f"{facts.address}: the same as here")
    if facts.welcome == "unchecked":
        return Check(
            name="secret",
            status="warn",
            found=f"{facts.address}: not compared, as none is known here",
            remedy="A job without a token file draws its own secret, which no command knows. To "
            "compare: --peer-token-file FILE or PENSTOCK_PEER_TOKEN, as the nodes have it.",
        )
    if facts.welcome == "name":
        return _failed(
            facts,
            "secret",
            "its certificate is for another address",
            "Ask it by the address that it has in Peers(…) or --peers, letter by letter.",
        )
    if facts.welcome == "clock":
        return _failed(
            facts,
            "secret",
            "its certificate isn't valid today",
            "Set the clocks of both machines (NTP); renew certificates of your own.",
        )
    return _failed(
        facts,
        "secret",
        "another one than here (or certificates that don't belong together)",
        "Copy one token file to all nodes. If they have it: another job's server has the port, "
        "and this job's listens at another, which its log names. Give jobs one token file, or "
        "each a port of its own.",
    )


def _clock(facts: PeerFacts) -> Check:
    ahead_s = facts.ahead_s
    if abs(ahead_s) <= _SOON_S:
        return Check(name="clock", status="ok", found=f"{facts.address}: as here")
    way = "ahead" if ahead_s > 0 else "behind"
    found = f"{facts.address}: {abs(ahead_s):,.0f} s {way}"
    if abs(ahead_s) < FAR_CLOCK_S:
        return Check(name="clock", status="ok", found=found)
    return Check(
        name="clock",
        status="warn",
        found=found,
        remedy="Nodes serve one another nevertheless, but logs don't fit together and other "
        "programs may fail: set the clocks (NTP).",
    )


def _requests(facts: PeerFacts) -> Check:
    if facts.request_s is None:
        return _failed(
            facts,
            "requests",
            "it ended the connection in mid-sentence",
            "Try again; if it stays so, look at the log of the job there.",
        )
    found = f"{facts.address}: {_time(facts.request_s)} a request"
    if facts.request_s <= SLOW_REQUEST_S:
        return Check(name="requests", status="ok", found=found)
    return Check(
        name="requests",
        status="warn",
        found=found,
        remedy="Far for nodes of one job: is the address in their own network, and that machine "
        "not overloaded?",
    )


def _rate(facts: PeerFacts) -> Check:
    if facts.size_bytes is None:
        return _failed(
            facts,
            "rate",
            "a range of a blob didn't come, or came wrong",
            "Look at the log of the job there, and at its disk: penstock doctor DIR.",
        )
    if not facts.size_bytes:
        found = f"{facts.address}: not measured, as its cache holds nothing yet"
        return Check(name="rate", status="ok", found=found)
    rate = facts.size_bytes / max(facts.range_s, 1e-9)
    found = (
        f"{facts.address}: {format_size(rate)}/s ({format_size(facts.size_bytes)} in "
        f"{_time(facts.range_s)}, one connection)"
    )
    if rate >= SLOW_BYTES_PER_S or facts.size_bytes < LEAST_RATED_BYTES:
        return Check(name="rate", status="ok", found=found)
    return Check(
        name="rate",
        status="warn",
        found=found,
        remedy="Slower than a network of 1 Gbit/s: does the address belong to the nodes' fast "
        "network? A first range may have waited for the disk: try again.",
    )


def _time(time_s: float) -> str:
    """A time in words: 0.21 ms, 34 ms, 1.2 s."""
    if time_s >= 1:
        return f"{time_s:.1f} s"
    digits = max(0, 1 - math.floor(math.log10(max(1e-5, 1000 * time_s))))
    return f"{1000 * time_s:.{digits}f} ms"
