"""List the doctor's checks of a store (`--url`) and of other nodes (`--peer`), and serve a node's
place (`--serve-peer`).

A store is asked once for each thing, without the retries of a training job, because a doctor must
report a fault at once instead of after two minutes. `--peer` connects to other nodes' servers and
checks that they accept this machine. `--serve-peer` runs a server in place of a job's node, because
otherwise only jobs and warm-ups run servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import typer

from penstock.cache import (
    ConfigError,
    FetchError,
    MissingDependencyError,
    WorkerError,
    ordered,
    peers,
    redact,
)
from penstock.cache.base import BlobSource, RequestError, Segment, format_size
from penstock.cache.disk import DiskCache, FolderLayout
from penstock.cache.stores import open_store
from penstock.pipeline.cli.doctor_table import (
    CheckTable,
    DoctorFacts,
    Finding,
    fail,
    ok,
    ok_if,
    warn,
)
from penstock.pipeline.cli.output import count, format_time
from penstock.pipeline.plan import peer_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.cache.base import Failure, ObjectInfo, Peers, Store

STORE, PEER = CheckTable(), CheckTable()

# --- a store -------------------------------------------------------------------------------------

# Enough for a stable median, and few enough for a metered store.
PROBES = 9
PROBE_BYTES = 64 * 2**10
# A request of 8 MiB at 100 MB/s takes 80 ms; far beyond that, latency dominates.
SLOW_STORE_S = 0.5
MANIFEST = "_penstock/manifest.arrow"

_REMEDIES: dict[Failure, str] = {
    "denied": "The store rejects this user: check the key, token or role in --storage-option or "
    "the environment, and its permission to list and read this URL.",
    "missing": "The URL doesn't exist: check bucket, prefix, region and endpoint.",
    "throttled": "The store throttles requests: try again, or request a higher limit.",
    "transient": "No usable response: check the network, a proxy, the endpoint and DNS.",
    "unreachable": "The server can't be reached: check that it runs, its host, port and network.",
    "changed": "The object was replaced during the read: try again when its writer has finished.",
    "refused": "The store lacks what training needs: try another endpoint or scheme.",
}


def store_facts(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Probe the store of a URL. Raises ConfigError for an invalid URL or options.

    url: without credentials. unusable: the reason why it has no usable store, or None.
    """
    try:
        store = open_store(url, options)
    except (MissingDependencyError, FetchError) as error:
        return {"url": redact(url), "unusable": str(error)}
    try:
        return {"unusable": None, **probe_store(store)}
    finally:
        store.close()


def probe_store(store: Store, *, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Probe a store, and return its facts. clock: a monotonic clock in seconds.

    listing, info, ranges: the RequestError of each, None if it succeeded or wasn't tried. objects,
    folders: their numbers at the top level. sample: the object that was read, or None. is_pack:
    True if it has a manifest. Of a sample that was read: request_s: median time of a range of
    `PROBE_BYTES`; slowest_s: the longest of these times. conditional: True if the store rejected a
    read of another version of the object.
    """
    found: dict[str, Any] = dict.fromkeys(("listing", "info", "ranges", "sample"))
    found |= {"url": store.url, "objects": 0, "folders": 0, "is_pack": False}
    try:
        objects, folders = store.list_folder()
        found |= {"objects": len(objects), "folders": len(folders)}
        found["sample"] = next((each for each in objects if each.size_bytes), None)
    except RequestError as error:
        found["listing"] = error
    try:
        manifest = store.info(MANIFEST)
        found["is_pack"] = manifest is not None
        found["sample"] = found["sample"] or manifest
        if found["sample"] is None and found["folders"]:
            found["sample"] = next((each for each in store.walk() if each.size_bytes), None)
    except RequestError as error:
        found["info"] = error
    if found["sample"] is not None:
        try:
            found |= _read(store, found["sample"], clock)
        except RequestError as error:
            found["ranges"] = error
    return found


def _read(store: Store, sample: ObjectInfo, clock: Callable[[], float]) -> dict[str, Any]:
    """Time some ranges of an object, and find out if the store checks its version."""
    times_s = []
    span_bytes = min(PROBE_BYTES, sample.size_bytes)
    for number in range(PROBES):
        start = number * (sample.size_bytes - span_bytes) // max(1, PROBES - 1)
        begun = clock()
        store.read(sample.path, (start, start + span_bytes), version=sample.version or None)
        times_s.append(clock() - begun)
    times_s.sort()
    return {
        "request_s": times_s[len(times_s) // 2],
        "slowest_s": times_s[-1],
        "conditional": bool(sample.version) and _refuses_another_version(store, sample),
    }


def _refuses_another_version(store: Store, sample: ObjectInfo) -> bool:
    try:
        store.read(sample.path, (0, 1), version=f"not-{sample.version}")
    except RequestError as error:
        return error.kind == "changed"
    return False


def _failed(error: RequestError, found: str = "") -> Finding:
    return fail(found or str(error), error.remedy or _REMEDIES[error.kind])


@STORE.check("store", lambda f: store_facts(f.asked, f.options), is_gate=True)
def _judge_store(f: DoctorFacts) -> Finding:
    """Correct the URL or --storage-option, or install the named package."""
    if f.unusable is not None:
        return fail(f.unusable)
    if f.listing is not None and f.is_pack:
        found = f"a pack; the store can't list it ({f.listing}), but a pack needs no listing"
        return ok(f"{f.url}: {found}")
    if f.listing is not None:
        reason = str(f.listing)
        return _failed(f.listing, reason if f.url in reason else f"{f.url}: {reason}")
    if not f.objects and not f.folders and not f.is_pack:
        return fail(f"{f.url}: the store answers, but the URL is empty", _REMEDIES["missing"])
    kind = "a pack, " if f.is_pack else ""
    numbers = f"{count(f.objects, 'object')} and {count(f.folders, 'folder')} at the top level"
    return ok(f"{f.url}: {kind}{numbers}")


@STORE.check("objects")
def _judge_objects(f: DoctorFacts) -> Finding | None:
    return None if f.info is None else _failed(f.info)


@STORE.check("ranges", is_gate=True)
def _judge_ranges(f: DoctorFacts) -> Finding | None:
    if f.sample is None:
        return None
    return ok("the store serves ranges of objects") if f.ranges is None else _failed(f.ranges)


@STORE.check("versions")
def _judge_versions(f: DoctorFacts) -> Finding:
    """A read could mix two versions of a replaced object: don't overwrite objects that a job reads;
    write new objects and a new index.
    """
    if f.conditional:
        return ok("changed objects are detected")
    served = "served another version than the requested one"
    return warn(f"the store {served if f.sample.version else 'reports no versions of its objects'}")


@STORE.check("requests")
def _judge_store_requests(f: DoctorFacts) -> Finding:
    """The store is far away or busy: use a store in this region, and fill the cache before the job:
    penstock warm URL --cache DIR --max-bytes SIZE.
    """
    size, slowest = format_size(PROBE_BYTES), f"at most {1000 * f.slowest_s:.0f} ms"
    found = f"{1000 * f.request_s:.0f} ms for {size} (median of {PROBES}), {slowest}"
    return ok_if(f.request_s <= SLOW_STORE_S, found)


# --- other nodes ---------------------------------------------------------------------------------

AT_ONCE = 16
SLOW_BYTES_PER_S = 50e6
LEAST_RATED_BYTES = 2**20  # with fewer bytes, latency dominates
SLOW_PEER_S = 0.05
FAR_CLOCK_S = 60.0
_SOON_S = 2.0  # the error of a Date header in whole seconds and of a request's time


def secret_of(settings: Peers) -> peers.PeerSecret | None:
    """Return the nodes' shared secret, if this node has it. Raises ConfigError."""
    token = peer_token()
    if settings.token_file is None and token is None:
        return None
    return peers.job_secret(settings, None, token)


def peer_facts(settings: Sequence[Peers]) -> list[peers.PeerFacts]:
    """Probe servers in parallel. Raises ConfigError, MissingDependencyError."""
    if unasked := [one.address for one in settings if not one.port]:
        raise ConfigError(
            f"--peer {unasked[0]}: got port 0, wanted the port at which that node listens, as in "
            "its Peers(…) or --peers, or as --serve-peer printed it."
        )
    return list(ordered(_probed, settings, workers=AT_ONCE, ahead=AT_ONCE, name="doctor"))


def _probed(settings: Peers) -> peers.PeerFacts:
    secret = secret_of(settings)
    tls: Callable[[], ssl.SSLContext] | None
    if secret is None:  # the job's certificate is unknown here, so a TLS server fails verification
        plain = settings.tls is False or (settings.tls is None and peers.is_loopback(settings.host))
        tls = None if plain else ssl.create_default_context
    else:
        credentials = peers.credentials_of(settings, secret)
        tls = None if credentials is None else credentials.client_context
    return peers.probe(settings.address, peers.ProbeSettings(secret, tls))


def peer_findings(facts: peers.PeerFacts) -> Iterator[Finding]:
    """Check the connection to a server, in the order in which faults would occur."""
    for finding in PEER.findings(facts):
        yield finding._replace(found=f"{facts.address}: {finding.found}")


def _ok_unless_fault(stage: str, f: peers.PeerFacts, found: str) -> Finding:
    """Return the fault of the connection if it failed at this stage."""
    fault = peers.fault_of(f)
    return fail(fault.found, fault.remedy) if fault and fault.stage == stage else ok(found)


@PEER.check("peer", is_gate=True)
def _judge_peer(f: peers.PeerFacts) -> Finding:
    return _ok_unless_fault("peer", f, f"reached in {format_time(f.connect_s)}")


@PEER.check("speaks", is_gate=True)
def _judge_protocol(f: peers.PeerFacts) -> Finding:
    return _ok_unless_fault("speaks", f, f.tls or peers.PROTOCOL_NAMES.get(f.speaks, ""))


@PEER.check("secret", is_gate=True)
def _judge_secret(f: peers.PeerFacts) -> Finding:
    """To compare, pass the nodes' secret by --peer-token-file FILE or PENSTOCK_PEER_TOKEN. A job
    without a token file draws a secret that no command knows.
    """
    if f.identity != "unchecked":
        return _ok_unless_fault("secret", f, "the same as here")
    return warn("not compared, because none was given")


@PEER.check("clock", is_gate=True)
def _judge_clock(f: peers.PeerFacts) -> Finding | None:
    """Synchronise the clocks (NTP). Nodes still serve each other, but logs disagree and other
    programs may fail.
    """
    if f.identity != "same":
        return None
    if abs(f.ahead_s) <= _SOON_S:
        return ok("equal to this node's")
    found = f"{abs(f.ahead_s):,.0f} s {'ahead' if f.ahead_s > 0 else 'behind'}"
    return ok_if(abs(f.ahead_s) < FAR_CLOCK_S, found)


@PEER.check("requests")
def _judge_peer_requests(f: peers.PeerFacts) -> Finding:
    """Slow for nodes of one job: check that the address belongs to their own network and that the
    machine isn't overloaded.
    """
    if f.request_s is None:
        remedy = "Try again; if it happens again, read the job's stderr on that node."
        return fail("the server closed the connection in the middle of a response", remedy)
    return ok_if(f.request_s <= SLOW_PEER_S, f"{format_time(f.request_s)} per request")


@PEER.check("rate")
def _judge_rate(f: peers.PeerFacts) -> Finding:
    """Slower than a network of 1 Gbit/s: check that the address belongs to the nodes' fast network.
    The first range may have waited for the disk, so try again.
    """
    if f.size_bytes is None:
        remedy = "Read the job's stderr on that node, and check its disk: penstock doctor DIR."
        return fail("a range of a blob was missing or wrong", remedy)
    if not f.size_bytes:
        return ok("not measured, because its cache is empty")
    rate = f.size_bytes / max(f.range_s, 1e-9)
    read = f"{format_size(f.size_bytes)} in {format_time(f.range_s)}, one connection"
    is_well = rate >= SLOW_BYTES_PER_S or f.size_bytes < LEAST_RATED_BYTES
    return ok_if(is_well, f"{format_size(rate)}/s ({read})")


# --- in place of a node --------------------------------------------------------------------------

SERVED_S = 600.0


def serve(settings: Peers, folder: Path | None, *, stop: threading.Event | None = None) -> None:
    """Serve a cache folder as a job's node does, for ten minutes or until an interrupt.

    folder: None serves 16 MiB of a temporary folder. Raises ConfigError, WorkerError, OSError,
    StalledError.
    """
    if (secret := secret_of(settings)) is None:
        raise ConfigError(
            f"--serve-peer {settings.address}: got no secret, wanted --peer-token-file FILE or "
            "PENSTOCK_PEER_TOKEN, the same on both nodes. Create one with `python -c 'import "
            "secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE`."
        )
    if folder is not None and not FolderLayout.is_cache(str(folder)):
        raise ConfigError(
            f"--serve-peer {settings.address}: got {folder}, which isn't a cache folder. Pass "
            "the folder of the job's DiskCache, or none to serve 16 MiB of a temporary folder."
        )
    with contextlib.ExitStack() as stack:
        if folder is None:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-doctor-"))
            cache = DiskCache(made, max_bytes="64MiB", peers=settings)
        else:
            cache = DiskCache.at(folder, peers=settings)
        stack.callback(cache.close)
        if folder is None:
            _put_sample(cache)
        server = stack.enter_context(contextlib.closing(peers.PeerServer(cache, settings, secret)))
        if settings.port and server.address != settings.address:
            raise WorkerError(
                f"--serve-peer {settings.address}: the port is in use by another program, or by "
                "the server of a job, which penstock doctor --peer on another node can check."
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


def _put_sample(cache: DiskCache) -> None:
    data, key = memoryview(os.urandom(peers.RANGE_BYTES)), os.urandom(20).hex()
    segment = Segment(path="sample", size_bytes=peers.RANGE_BYTES, version=None, object_bytes=None)
    blob = BlobSource(key=key, uri="sample", segments=[segment], size_bytes=peers.RANGE_BYTES)
    cache.use(lambda shelf: shelf.put(blob, data, group="0" * 32, kept=False))


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
