"""Test that a store answers, accepts the credentials, lists and serves ranges.

This is `penstock doctor --url`. `probe` sends each request once, without the retries of a training
job, because a doctor must report a fault at once instead of after two minutes. `store_checks`
turns its facts into checks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import FetchError, MissingDependencyError
from penstock.cache.base import ObjectInfo, RequestError, format_size
from penstock.pipeline.cli.doctor_checks import Check, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cache.base import Failure, Store

# Enough for a stable median, and few enough for a metered store.
PROBES = 9
PROBE_BYTES = 64 * 2**10
# A request of 8 MiB at 100 MB/s takes 80 ms; far beyond that, latency dominates.
SLOW_REQUEST_S = 0.5
MANIFEST = "_penstock/manifest.arrow"

_REMEDIES: dict[Failure, str] = {
    "denied": "The store rejects this user: check the key, token or role in --storage-option or "
    "the environment, and its permission to list and read this URL.",
    "missing": "The URL doesn't exist: check bucket, prefix, region and endpoint.",
    "throttled": "The store throttles requests: try again, or request a higher limit.",
    "transient": "No usable response: check the network, a proxy, the endpoint and DNS.",
    "unreachable": "The server can't be reached: check the host, the port, the network, and that "
    "the server runs.",
    "changed": "The object was replaced during the read: try again when its writer has finished.",
    "refused": "The store doesn't support what training needs (see the reason): another endpoint "
    "or scheme may.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A failed request. reason: for people, without credentials; remedy: None uses the remedy of
    the kind."""

    kind: Failure
    reason: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The facts of a store. url: without credentials.

    unusable: the reason why the URL has no usable store, or None. listing, info, ranges: the
    failure of each, None if it succeeded or wasn't tried. objects, folders: their numbers at the
    top level. sample: the object that was read, or None. is_pack: True if it has a manifest.
    request_s: median time of a range of `PROBE_BYTES`; slowest_s: the longest of these times.
    conditional: True if the store rejected a read of another version of the object.
    """

    url: str
    unusable: str | None = None
    listing: RequestFailure | None = None
    objects: int = 0
    folders: int = 0
    is_pack: bool = False
    sample: ObjectInfo | None = None
    info: RequestFailure | None = None
    ranges: RequestFailure | None = None
    request_s: float = 0.0
    slowest_s: float = 0.0
    conditional: bool = False


def store_facts(url: str, options: Mapping[str, Any]) -> StoreFacts:
    """Probe the store of a URL. Raises ConfigError for an invalid URL or options."""
    from penstock.cache import redact
    from penstock.cache.stores import open_store

    try:
        store = open_store(url, options)
    except (MissingDependencyError, FetchError) as error:
        return StoreFacts(url=redact(url), unusable=str(error))
    try:
        return probe(store)
    finally:
        store.close()


def probe(store: Store, *, clock: Callable[[], float] = time.perf_counter) -> StoreFacts:
    """Probe a store. clock: a monotonic clock in seconds."""
    found: dict[str, Any] = {"url": store.url}
    sample: ObjectInfo | None = None
    try:
        objects, folders = store.list_folder()
        found |= {"objects": len(objects), "folders": len(folders)}
        sample = next((each for each in objects if each.size_bytes), None)
    except RequestError as error:
        found["listing"] = _failure_of(error)
    try:
        manifest = store.info(MANIFEST)
        found["is_pack"] = manifest is not None
        sample = sample or manifest
        if sample is None and found.get("folders"):
            sample = next((each for each in store.walk() if each.size_bytes), None)
    except RequestError as error:
        found["info"] = _failure_of(error)
    if sample is not None:
        found["sample"] = sample
        try:
            found |= _read(store, sample, clock)
        except RequestError as error:
            found["ranges"] = _failure_of(error)
    return StoreFacts(**found)


def _read(store: Store, sample: ObjectInfo, clock: Callable[[], float]) -> dict[str, Any]:
    """Time some ranges of an object, and find out if the store checks its version."""
    taken = []
    span_bytes = min(PROBE_BYTES, sample.size_bytes)
    for number in range(PROBES):
        start = number * (sample.size_bytes - span_bytes) // max(1, PROBES - 1)
        begun = clock()
        store.read(sample.path, (start, start + span_bytes), version=sample.version or None)
        taken.append(clock() - begun)
    taken.sort()
    return {
        "request_s": taken[len(taken) // 2],
        "slowest_s": taken[-1],
        "conditional": bool(sample.version) and _refuses_another_version(store, sample),
    }


def _refuses_another_version(store: Store, sample: ObjectInfo) -> bool:
    try:
        store.read(sample.path, (0, 1), version=f"not-{sample.version}")
    except RequestError as error:
        return error.kind == "changed"
    return False


def _failure_of(error: RequestError) -> RequestFailure:
    return RequestFailure(kind=error.kind, reason=str(error), remedy=error.remedy)


def store_checks(facts: StoreFacts) -> Iterator[Check]:
    """Check a store, in the order in which faults would stop a job."""
    if facts.unusable is not None:
        yield Check(
            name="store",
            status="fail",
            found=facts.unusable,
            remedy="Correct the URL or --storage-option, or install the named package.",
        )
        return
    yield _listing(facts)
    if facts.info is not None:
        yield _failed("objects", facts.info)
    if facts.sample is None:
        return
    yield _ranges(facts)
    if facts.ranges is None:
        yield _versions(facts)
        yield _times(facts)


def _listing(facts: StoreFacts) -> Check:
    if facts.listing is not None:
        if not facts.is_pack:
            return _failed("store", facts.listing, url=facts.url)
        return Check(
            name="store",
            status="ok",
            found=f"{facts.url}: a pack; the store can't list it ({facts.listing.reason}), but a "
            "pack needs no listing",
        )
    if not facts.objects and not facts.folders and not facts.is_pack:
        return Check(
            name="store",
            status="fail",
            found=f"{facts.url}: the store answers, but the URL is empty",
            remedy=_REMEDIES["missing"],
        )
    kind = "a pack, " if facts.is_pack else ""
    found = (
        f"{kind}{count(facts.objects, 'object')} and {count(facts.folders, 'folder')} at the top "
        "level"
    )
    return Check(name="store", status="ok", found=f"{facts.url}: {found}")


def _ranges(facts: StoreFacts) -> Check:
    if facts.ranges is not None:
        return _failed("ranges", facts.ranges)
    return Check(name="ranges", status="ok", found="the store serves ranges of objects")


def _versions(facts: StoreFacts) -> Check:
    sample = facts.sample
    if sample is not None and facts.conditional:
        return Check(name="versions", status="ok", found="changed objects are detected")
    return Check(
        name="versions",
        status="warn",
        found="the store reports no versions of its objects"
        if sample is not None and not sample.version
        else "the store served another version than the requested one",
        remedy="A read could mix two versions of a replaced object: don't overwrite objects that a "
        "job reads; write new objects and a new index.",
    )


def _times(facts: StoreFacts) -> Check:
    found = (
        f"{1000 * facts.request_s:.0f} ms for {format_size(PROBE_BYTES)} (median of {PROBES}), "
        f"at most {1000 * facts.slowest_s:.0f} ms"
    )
    if facts.request_s <= SLOW_REQUEST_S:
        return Check(name="requests", status="ok", found=found)
    return Check(
        name="requests",
        status="warn",
        found=found,
        remedy="The store is far away or busy: use a store in this region, and fill the cache "
        "before the job: penstock warm URL --cache DIR --max-bytes SIZE.",
    )


def _failed(name: str, failure: RequestFailure, *, url: str | None = None) -> Check:
    found = f"{url}: {failure.reason}" if url and url not in failure.reason else failure.reason
    remedy = failure.remedy or _REMEDIES[failure.kind]
    return Check(name=name, status="fail", found=found, remedy=remedy)
