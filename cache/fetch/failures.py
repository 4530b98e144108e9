"""The error of a request that came to nothing, and what its reader can do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.store import RequestError
from penstock.cache.errors import FetchError, ObjectChangedError

if TYPE_CHECKING:
    from penstock.cache.errors import PenstockError
    from penstock.cache.fetch.requests import Request

FORKED = (
    "its connections belong to the process that opened them, and this is a forked child. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and make the dataset inside the worker'
)

_REMEDIES = {
    "transient": "Check that the server is up and the network, or raise retry_timeout in "
    "storage_options.",
    "unreachable": "Check the host and the port in the URL (or endpoint_url), and that the server "
    "is up.",
    "throttled": "The store asks for fewer requests: use larger shards, fewer jobs at a time, or "
    "raise retry_timeout in storage_options.",
    "missing": "Check the path for a typing error; if it was there, the dataset changed since it "
    "was indexed: run `penstock index` again.",
    "denied": "Check the credentials, the region and the endpoint in storage_options; a public "
    "bucket wants anon=True. Of what isn't there a store says the same to those who may not list: "
    "check the path, too.",
    "changed": "It was replaced after it was indexed: run `penstock index` (or upload the pack) "
    "again, and don't write to a dataset while jobs read it.",
    "refused": "Trying again would not help.",
}


def fetch_error(request: Request, failure: RequestError | None, now_s: float) -> PenstockError:
    """Make the FetchError (or ObjectChangedError) of a request that is given up.

    failure: the last one of its call; None if there was none, so it just took too long.
    """
    failure = failure or RequestError("transient", "no answer came")
    tries = f"{request.attempts} attempt{'s' if request.attempts != 1 else ''}"
    took_s = now_s - request.first_s if request.first_s else 0.0
    kind = ObjectChangedError if failure.kind == "changed" else FetchError
    return kind(
        f"{request.uri}: not fetched after {tries} in {took_s:.1f} s "
        f"({failure.kind}: {failure}). {failure.remedy or _REMEDIES[failure.kind]}",
        uri=request.uri,
        missing=failure.kind == "missing",
    )
