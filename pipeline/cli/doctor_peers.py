"""Test the connection between nodes before a job (`penstock doctor --peer` and `--serve-peer`).

`--peer` connects to other nodes' servers and checks that they accept this machine; `peer_checks` is
a pure function of the facts from `cache.peers.peer_diagnosis`. `--serve-peer` runs a server in
place of a job's node, because otherwise only jobs and warm-ups run servers.
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
LEAST_RATED_BYTES = 2**20  # with fewer bytes, latency dominates
SLOW_REQUEST_S = 0.05
FAR_CLOCK_S = 60.0
_SOON_S = 2.0  # the error of a Date header in whole seconds and of a request's time


def secret_of(settings: Peers) -> PeerSecret | None:
    """Return the nodes' shared secret, if this node has it. Raises ConfigError."""
    from penstock.cache.peers import job_secret
    from penstock.pipeline.plan import peer_token

    token = peer_token()
    if settings.token_file is None and token is None:
        return None
    return job_secret(settings, None, token)


def peer_facts(settings: Sequence[Peers]) -> list[PeerFacts]:
    """Probe servers in parallel. Raises ConfigError, MissingDependencyError."""
    from penstock.cache import ordered
    from penstock.cache.peers import probe

    if unasked := [one.address for one in settings if not one.port]:
        raise ConfigError(
            f"--peer {unasked[0]}: got port 0, wanted the port at which that node listens, as in "
            "its Peers(…) or --peers, or as --serve-peer printed it."
        )
    asked = [(one.address, _asking(one)) for one in settings]
    return list(
        ordered(lambda one: probe(*one), asked, workers=AT_ONCE, ahead=AT_ONCE, name="doctor")
    )


def _asking(settings: Peers) -> ProbeSettings:
    import ssl

    from penstock.cache.peers import ProbeSettings, credentials_of, is_loopback

    secret = secret_of(settings)
    if secret is None:  # the job's certificate is unknown here, so a TLS server fails verification
        plain = settings.tls is False or (settings.tls is None and is_loopback(settings.host))
        return ProbeSettings(None, None if plain else ssl.create_default_context)
    credentials = credentials_of(settings, secret)
    return ProbeSettings(secret, None if credentials is None else credentials.client_context)


def peer_checks(facts: PeerFacts) -> Iterator[Check]:
    """Check the connection to a server, in the order in which faults would occur."""
    fault = fault_of(facts)
    if facts.failure is None:
        found = f"{facts.address}: reached in {_time(facts.connect_s)}"
        yield Check(name="peer", status="ok", found=found)
        if fault is None or fault.stage == "secret":
            found = f"{facts.address}: {facts.tls or PROTOCOL_NAMES[facts.speaks]}"
            yield Check(name="speaks", status="ok", found=found)
    if fault is not None:
        yield _failed(facts, *fault)
        return
    yield _secret(facts)
    if facts.identity == "same":
        yield _clock(facts)
        yield _requests(facts)
        yield _rate(facts)


def _failed(facts: PeerFacts, name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="fail", found=f"{facts.address}: {found}", remedy=remedy)


def _secret(facts: PeerFacts) -> Check:
    if facts.identity == "same":
        return Check(name="secret", status="ok", found=f"{facts.address}: the same as here")
    return Check(
        name="secret",
        status="warn",
        found=f"{facts.address}: not compared, because none was given",
        remedy="To compare, pass the nodes' secret by --peer-token-file FILE or "
        "PENSTOCK_PEER_TOKEN. A job without a token file draws a secret that no command knows.",
    )


def _clock(facts: PeerFacts) -> Check:
    ahead_s = facts.ahead_s
    if abs(ahead_s) <= _SOON_S:
        return Check(name="clock", status="ok", found=f"{facts.address}: equal to this node's")
    way = "ahead" if ahead_s > 0 else "behind"
    found = f"{facts.address}: {abs(ahead_s):,.0f} s {way}"
    if abs(ahead_s) < FAR_CLOCK_S:
        return Check(name="clock", status="ok", found=found)
    return Check(
        name="clock",
        status="warn",
        found=found,
        remedy="Synchronise the clocks (NTP). Nodes still serve each other, but logs disagree and "
        "other programs may fail.",
    )


def _requests(facts: PeerFacts) -> Check:
    if facts.request_s is None:
        return _failed(
            facts,
            "requests",
            "the server closed the connection in the middle of a response",
            "Try again; if it happens again, read the job's stderr on that node.",
        )
    found = f"{facts.address}: {_time(facts.request_s)} per request"
    if facts.request_s <= SLOW_REQUEST_S:
        return Check(name="requests", status="ok", found=found)
    return Check(
        name="requests",
        status="warn",
        found=found,
        remedy="Slow for nodes of one job: check that the address belongs to their own network and "
        "that the machine isn't overloaded.",
    )


def _rate(facts: PeerFacts) -> Check:
    if facts.size_bytes is None:
        return _failed(
            facts,
            "rate",
            "a range of a blob was missing or wrong",
            "Read the job's stderr on that node, and check its disk: penstock doctor DIR.",
        )
    if not facts.size_bytes:
        found = f"{facts.address}: not measured, because its cache is empty"
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
        remedy="Slower than a network of 1 Gbit/s: check that the address belongs to the nodes' "
        "fast network. The first range may have waited for the disk, so try again.",
    )


def _time(time_s: float) -> str:
    """Format a time: 0.21 ms, 34 ms, 1.2 s."""
    if time_s >= 1:
        return f"{time_s:.1f} s"
    digits = max(0, 1 - math.floor(math.log10(max(1e-5, 1000 * time_s))))
    return f"{1000 * time_s:.{digits}f} ms"


SERVED_S = 600.0


def serve(settings: Peers, folder: Path | None, *, stop: threading.Event | None = None) -> None:
    """Serve a cache folder as a job's node does, for ten minutes or until an interrupt.

    folder: None serves 16 MiB of a temporary folder. Raises ConfigError, WorkerError, OSError,
    StalledError.
    """
    from penstock.cache.disk import DiskCache, FolderLayout

    if (secret := secret_of(settings)) is None:
        raise ConfigError(
            f"--serve-peer {settings.address}: got no secret, wanted --peer-token-file FILE or "
            "PENSTOCK_PEER_TOKEN, the same on both nodes. Create one with `python -c 'import "
            "secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE`."
        )
    if folder is not None:
        if not FolderLayout.is_cache(str(folder)):
            raise ConfigError(
                f"--serve-peer {settings.address}: got {folder}, which isn't a cache folder. Pass "
                "the folder of the job's DiskCache, or none to serve 16 MiB of a temporary folder."
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
                    f"--serve-peer {settings.address}: the port is in use by another program, or "
                    "by the server of a job, which penstock doctor --peer on another node can "
                    "check."
                )
            protocol = "TLS" if server.is_encrypted else "plain HTTP"
            typer.echo(
                f"serving at {server.address} ({protocol}) for {SERVED_S / 60:.0f} minutes; Ctrl-C "
                "stops it. On another node, with the same secret:\n"
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
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that the temporary folder is removed."""
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
