"""Test the way between nodes before a job runs (`penstock doctor --peer` and `--serve-peer`).

`--peer` connects to other nodes' servers and checks that they admit this machine; `peer_checks`
is a pure function of what `cache.peers.peer_diagnosis` found. `--serve-peer` stands in for a
job's node, because servers otherwise run with jobs and warm-ups alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
from typing import TYPE_CHECKING

import typer

from penstock.cache import ConfigError, WorkerError
from penstock.cache.base import format_size
from penstock.cache.peers import PROTOCOL_NAMES, fault_of
from penstock.pipeline.cli.doctor_checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.cache.base import Peers
    from penstock.cache.disk import DiskCache
    from penstock.cache.peers import PeerFacts, PeerSecret, ProbeSettings

AT_ONCE = 16
SLOW_BYTES_PER_S = 50e6
LEAST_RATED_BYTES = 2**20  # of less the request's own time is most
SLOW_REQUEST_S = 0.05
FAR_CLOCK_S = 60.0
_SOON_S = 2.0  # what a Date of whole seconds and a request's time leave open


def secret_of(settings: Peers) -> PeerSecret | None:
    """Return the nodes' shared secret, if this node has it. Raises ConfigError."""
    from penstock.cache.peers import job_secret
    from penstock.pipeline.plan import peer_token

    token = peer_token()
    if settings.token_file is None and token is None:
        return None
    return job_secret(settings, None, token)


def peer_facts(settings: Sequence[Peers]) -> list[PeerFacts]:
    """Ask all of these servers, many at a time. Raises ConfigError, MissingDependencyError."""
    from penstock.cache import ordered
    from penstock.cache.peers import probe

    if unasked := [one.address for one in settings if not one.port]:
        raise ConfigError(
            f"--peer {unasked[0]}: got port 0, wanted the one at which that node listens: that of "
            "Peers(…) or --peers there, or what --serve-peer said."
        )
    asked = [(one.address, _asking(one)) for one in settings]
    return list(
        ordered(lambda one: probe(*one), asked, workers=AT_ONCE, ahead=AT_ONCE, name="doctor")
    )


def _asking(settings: Peers) -> ProbeSettings:
    import ssl

    from penstock.cache.peers import ProbeSettings, credentials_of, is_loopback

    secret = secret_of(settings)
    if secret is None:  # no certificate of the job's: who speaks TLS shows one that isn't known
        plain = settings.tls is False or (settings.tls is None and is_loopback(settings.host))
        return ProbeSettings(None, None if plain else ssl.create_default_context)
    credentials = credentials_of(settings, secret)
    return ProbeSettings(secret, None if credentials is None else credentials.client_context)


# -- judging


def peer_checks(facts: PeerFacts) -> Iterator[Check]:
    """Judge the way to a server, in the order in which its faults would show."""
    fault = fault_of(facts)
    if facts.failure is None:
        found = f"{facts.address}: reached in {_time(facts.connect_s)}"
        yield Check(name="peer", status="ok", found=found)
        if fault is None or fault.stage == "secret":
            found = f"{facts.address}: {facts.tls or PROTOCOL_NAMES[facts.speech]}"
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


SERVED_S = 600.0


def serve(settings: Peers, folder: Path | None, *, stop: threading.Event | None = None) -> None:
    """Serve as a job's node does, for ten minutes or until it is interrupted: a cache folder, or
    16 MiB of a temporary one. Raises ConfigError, WorkerError, OSError, StalledError."""
    from penstock.cache.disk import DiskCache, FolderLayout

    if (secret := secret_of(settings)) is None:
        raise ConfigError(
            f"--serve-peer {settings.address}: got no secret, wanted --peer-token-file FILE or "
            "PENSTOCK_PEER_TOKEN, the same on both nodes. Make one with `python -c 'import "
            "secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE`."
        )
    if folder is not None:
        if not FolderLayout.is_cache(str(folder)):
            raise ConfigError(
                f"--serve-peer {settings.address}: got {folder}, which is no cache folder, and "
                "none is made. Pass the folder of the job's DiskCache, or none: then 16 MiB of a "
                "temporary one are served."
            )
        _serve(settings, secret, DiskCache.at(folder, peers=settings), stop)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as made:
        cache = DiskCache(made, max_bytes="64MiB", peers=settings)
        _put_sample(cache)
        _serve(settings, secret, cache, stop)


def _put_sample(cache: DiskCache) -> None:
    from penstock.cache.base import BlobSource, Segment
    from penstock.cache.peers import RANGE_BYTES

    segment = Segment(path="sample", size_bytes=RANGE_BYTES, version=None, object_bytes=None)
    blob = BlobSource(
        key=os.urandom(20).hex(), uri="sample", segments=[segment], size_bytes=RANGE_BYTES
    )
    data = memoryview(os.urandom(RANGE_BYTES))
    cache.use(lambda shelf: shelf.writer.put(blob, data, group="0" * 32, kept=False))


def _serve(
    settings: Peers, secret: PeerSecret, cache: DiskCache, stop: threading.Event | None
) -> None:
    from penstock.cache.peers import PeerServer

    try:
        server = PeerServer(cache, settings, secret)
        try:
            if settings.port and server.address != settings.address:
                raise WorkerError(
                    f"--serve-peer {settings.address}: the port is taken, by another program or "
                    "by the server of a job, which penstock doctor --peer can ask from elsewhere."
                )
            spoken = "TLS" if server.is_encrypted else "plain HTTP"
            typer.echo(
                f"serving at {server.address} ({spoken}) for {SERVED_S / 60:.0f} minutes; Ctrl-C "
                "ends it. On another node, with the same secret:\n"
                f"  penstock doctor --peer {server.address} --peer-token-file FILE",
                err=True,
            )
            with contextlib.suppress(KeyboardInterrupt), _ended_by_signals():
                (stop or threading.Event()).wait(SERVED_S)
        finally:
            server.close()
    finally:
        cache.close()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have `kill`, `timeout` and a closed terminal end it as Ctrl-C does: with its folder."""
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
