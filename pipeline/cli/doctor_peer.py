"""`penstock doctor --peer`: does this machine reach other nodes' servers, and is it let in there.

`peer_checks` is a pure function of what `cache.peers.probe` found.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.cache.peers.faults import SPEECH, fault_of
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
    fault = fault_of(facts)
    if facts.failure is None:
        found = f"{facts.address}: reached in {_time(facts.connect_s)}"
        yield Check(name="peer", status="ok", found=found)
        if fault is None or fault.stage == "secret":
            found = f"{facts.address}: {facts.tls or SPEECH[facts.speech]}"
            yield Check(name="speaks", status="ok", found=found)
    if fault is not None:
        yield _failed(facts, *fault)
        return
    yield _secret(facts)
    if facts.welcome == "same":
        yield _clock(facts)
        yield _requests(facts)
        yield _rate(facts)


def _failed(facts: PeerFacts, name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="fail", found=f"{facts.address}: {found}", remedy=remedy)


def _secret(facts: PeerFacts) -> Check:
    if facts.welcome == "same":
        return Check(name="secret", status="ok", found=f"{facts.address}: the same as here")
    return Check(
        name="secret",
        status="warn",
        found=f"{facts.address}: not compared, as none is known here",
        remedy="A job without a token file draws its own secret, which no command knows. To "
        "compare: --peer-token-file FILE or PENSTOCK_PEER_TOKEN, as the nodes have it.",
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
            "Try again; if it stays so, look at what the job there writes to stderr.",
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
            "Look at what the job there writes to stderr, and at its disk: penstock doctor DIR.",
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
