"""What moving bytes takes of the cores, as measured; docs/sizing.md says where and on what.

CPU seconds are of a core of the machine that they were measured on: faster cores take less.
"""

from __future__ import annotations

from penstock.cache.base.fetch_policy import FetchPolicy

FETCH_S_PER_GB, FETCH_S_PER_REQUEST = 0.63, 0.12e-3
"""Of the client of a store: 0.63, 0.75 and 2.4 CPU-s a GB in ranges of 8 MiB, 1 MiB and 64 KiB."""

READ_S_PER_GB = 0.35
"""Of reading and checking samples that are on the local disk or in memory."""

PEER_CLIENT_S_PER_GB, PEER_SERVER_S_PER_GB = 0.47, 0.24
"""Of ranges of 8 MiB from another node's cache, plain HTTP: the client's checksums, its writes to
disk and its books among it."""

PEER_TLS_CLIENT_S_PER_GB, PEER_TLS_SERVER_S_PER_GB = 0.95, 0.69
"""Of the same, encrypted: 0.70 + 0.69 were measured without writes and books, which take 0.25 plain
(0.47 less 0.22 without them)."""

NIC_PAYLOAD = 1448 / 1538
"""Of what a network carries: TCP's payload of a full Ethernet frame, its gap and headers among it
(40 bytes of IP and TCP, 12 of time stamps, 38 of Ethernet)."""

RAM_SHARE = 0.5
"""Of a node's memory, that the kernel may keep cached files in: the rest is the job's."""

REQUEST_BYTES = FetchPolicy().range_bytes
CONNECTIONS_A_RANK = FetchPolicy().start_connections
"""That a rank begins with; where more bring more it goes up to half as many more, by and by."""

OPENERS = 16
"""Shards that a rank opens at a time, as `readers.reading.open_shards` does."""

MARGIN_SHARE = 0.002
"""Of the cache's limit, that isn't for shards."""


def fetch_cpu_s(size_bytes: float, requests: float) -> float:
    """CPU seconds to fetch so many bytes from a store by so many requests."""
    return FETCH_S_PER_GB * size_bytes / 1e9 + FETCH_S_PER_REQUEST * requests


def peer_cpu_s(size_bytes: float, *, tls: bool) -> float:
    """CPU seconds of both sides for bytes that come from peers."""
    if tls:
        return (PEER_TLS_CLIENT_S_PER_GB + PEER_TLS_SERVER_S_PER_GB) * size_bytes / 1e9
    return (PEER_CLIENT_S_PER_GB + PEER_SERVER_S_PER_GB) * size_bytes / 1e9
