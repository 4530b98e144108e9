"""Measure fills of a cache from another node or from nginx: a part of benchmarks.peers.

Another process fills, so that its CPU time includes no other work. It writes and removes files of
the same size first: on a virtual machine, memory that was never written costs the host, and so this
process, about 2 CPU-s per GB more, whatever the source of the bytes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock import DiskCache
from penstock.cache.base import BlobSource, Segment, blob_key
from penstock.cache.blobs import Remote
from penstock.cache.fetch import Fetcher
from penstock.cache.peers import Peer, PeerClient, PeerLimits, PeerSecret, PeerUpstream
from penstock.cache.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOBS, MOST_BLOB_BYTES = 16, 2**25
_WARM, _AT_ONCE = 3, 4
SHARE = (BLOBS - _WARM) / BLOBS
"""Of what is served, this is filled behind the first blobs."""
GROUP = "a" * 32
_PATIENT = PeerLimits(connect_s=60, silent_s=60)
"""There is no other way to the bytes: on a machine that others use, who is slow is still asked."""


def blob(number: int, size_bytes: int) -> BlobSource:
    """Return a blob of the set, which is an object of its own in the store."""
    name = f"blob{number}"
    segment = Segment(path=name, size_bytes=size_bytes, version=None)
    key = blob_key(scope="", uri=name, version="")
    return BlobSource(key=key, uri=name, segments=[segment], size_bytes=size_bytes)


@contextlib.contextmanager
def remote_of(
    folder: str, url: str, address: str, secret: PeerSecret, blobs: list[BlobSource]
) -> Iterator[Remote]:
    """Return a node with an empty cache. address: of the node that has all, "" for no peer."""
    fetcher = Fetcher(open_store(url, {}))
    cache = DiskCache(folder, max_bytes="4GiB")
    upstream = None
    if address:
        upstream = PeerUpstream(fetcher)
        upstream.use_peers([Peer(1, address)], PeerClient(secret, limits=_PATIENT))
    remote = Remote(fetcher, cache, group=GROUP, label="fills", upstream=upstream)
    remote.join([one.key for one in blobs], [one.size_bytes for one in blobs])
    try:
        yield remote
    finally:
        remote.close()
        cache.close()


class Filled(NamedTuple):
    """The cost of the fills, of their process, without the first blobs."""

    cpu_s: float
    size_bytes: float
    took_s: float


def fill(folder: str, url: str, address: str, secret: PeerSecret, blob_bytes: int) -> Filled:
    """Fill a cache in a process of its own.

    url: of the store. address: of the node that is asked first, "" for none.
    """
    place = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "benchmarks.peer_fills", place, url, address]
    command.append(str(blob_bytes))
    try:
        child = subprocess.run(
            command, input=secret.value, stdout=subprocess.PIPE, check=True, timeout=300
        )
    finally:
        shutil.rmtree(place)
    return Filled(*map(float, child.stdout.split()))


def _touch_memory(folder: str, blob_bytes: int) -> None:
    part = bytes(2**23)
    for _ in range(3):
        places = [Path(folder, f"touch{n}") for n in range(BLOBS)]
        for place in places:
            with place.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, blob_bytes)
                for _ in range(blob_bytes // len(part)):
                    file.write(part)
        for place in places:
            place.unlink()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Fill, and print the CPU-seconds and the bytes."""
    folder, url, address = sys.argv[1:4]
    blob_bytes = int(sys.argv[4])
    secret = PeerSecret(sys.stdin.buffer.read())
    cache = os.path.join(folder, "cache")
    blobs = [blob(n, blob_bytes) for n in range(BLOBS)]
    with (
        remote_of(cache, url, address, secret, blobs) as remote,
        ThreadPoolExecutor(_AT_ONCE) as threads,
    ):
        list(threads.map(remote.fill, blobs[:_WARM]))  # threads and connections
        _touch_memory(folder, blob_bytes)
        began_s, before_s, before = time.monotonic(), _cpu_s(), remote.traffic()
        filled = sum(threads.map(remote.fill, blobs[_WARM:]))
        cpu_s, took_s = _cpu_s() - before_s, time.monotonic() - began_s
        from_store = remote.traffic().bytes_remote - before.bytes_remote
    if filled != (BLOBS - _WARM) * blob_bytes or bool(from_store) == bool(address):
        raise RuntimeError(f"{filled} bytes were filled, {from_store} of them from the store")
    print(cpu_s, filled, took_s)


if __name__ == "__main__":
    main()
