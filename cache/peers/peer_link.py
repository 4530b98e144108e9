"""Connect a dataset's remote to the caches of the job's other nodes: serve them, and use theirs.

No server and no request is started before `begin`. If the other nodes can't be found, the job uses
the remote, with one warning.

Nodes exchange addresses through the job's store. Each node publishes its own once; the first node
waits for all, for a limited time, and publishes the list as one text, so that the store answers one
short request per node. Later nodes are on the list when it is read again:

| key             | who writes              | who waits, and how long                           |
|-----------------|-------------------------|---------------------------------------------------|
| entry (notices) | each node its address   | the first node: `_ADDRESSES_S` for all nodes      |
| all             | the first node the list | the others, as long; nobody when they read again  |
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.base import Peers, check_address
from penstock.cache.errors import ConfigError, JobStoreError, StalledError, WorkerError, warn
from penstock.cache.peers.peer_client import PeerClient
from penstock.cache.peers.peer_directory import Peer, PlannedReaders
from penstock.cache.peers.server_process import PeerServer, check_own_settings
from penstock.cache.peers.trust import PeerSecret, credentials_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.channel import JobStore
    from penstock.cache.disk import DiskCache
    from penstock.cache.peers.peer_upstream import PeerUpstream

_NO_SERVER = ""
"""The address that a node publishes if its cache can't be served, such as on a full disk."""


class NodeRanks(NamedTuple):
    """The ranks [first, end) of a node. size: the number of ranks of the job."""

    first: int
    end: int
    size: int


class PeerExchange:
    """The exchange of the nodes' addresses through the job's store, for one node.

    Safe for several threads, because one may wait for the store while another reads late entries.
    Every method raises JobStoreError.
    """

    def __init__(self, store: JobStore, ranks: NodeRanks) -> None:
        """store: the job's, under the same name on all nodes."""
        self._store, self._ranks = store, ranks

    def publish(self, address: str) -> None:
        """Publish the address of this node's server ("": none, so that no node waits for it). The
        latest one counts."""
        self._store.post("entry", json.dumps([self._ranks.first, self._ranks.end, address]))

    def read_peers(self, *, timeout_s: float) -> list[Peer]:
        """Return the other nodes that have published an address, after waiting up to timeout_s for
        all of them, or for the first node's list."""
        if self._ranks.first == 0:
            listed = json.dumps(self._gather(time.monotonic() + timeout_s))
            self._store.set("all", listed)
            return self._others(listed)
        return self._others(self._store.wait("all", timeout_s=timeout_s))

    def _gather(self, until_s: float) -> list[tuple[int, int, str]]:
        """Return the entries of all nodes, as soon as those of all ranks are there or the time has
        passed."""
        while True:
            notices = self._store.notices("entry")
            # A node whose server has moved has several entries, of which the last one counts.
            entries = {entry[0]: entry for entry in _entries(f"[{','.join(notices.values())}]")}
            left_s = until_s - time.monotonic()
            ranks = sum(end - first for first, end, _ in entries.values())
            if ranks >= self._ranks.size or left_s <= 0:
                return sorted(entries.values())
            coming = next(number for number in itertools.count(1) if number not in notices)
            self._store.wait(f"entry-{coming}", timeout_s=left_s)

    def _others(self, text: str | None) -> list[Peer]:
        """Return the other nodes of a list, numbered in the order of their ranks. If all have
        equally many ranks, missing nodes keep their numbers."""
        entries = [] if text is None else _entries(text)
        size = self._ranks.end - self._ranks.first
        are_equal = all(end - first == size and first % size == 0 for first, end, _ in entries)
        return [
            Peer(first // size if are_equal else place, address)
            for place, (first, _, address) in enumerate(entries)
            if first != self._ranks.first and address != _NO_SERVER
        ]


def _entries(text: str) -> list[tuple[int, int, str]]:
    """Parse the nodes' entries: first rank, end and address of each. Raises JobStoreError."""
    try:
        found = [(first, end, address) for first, end, address in json.loads(text)]
        for first, end, address in found:
            if type(first) is not int or type(end) is not int or not 0 <= first < end:
                raise ValueError("invalid ranks")
            if address != _NO_SERVER:
                check_address(address, what="a node's address")
    except (ValueError, TypeError) as error:  # ConfigError is a ValueError
        raise JobStoreError(
            "The nodes' addresses in the job's store weren't written by this version of Penstock: "
            "another program writes to the store, or some nodes run another version."
        ) from error
    return found


_ADDRESSES_S = 15.0
"""Seconds for which the first pass waits for the other nodes' addresses."""


class PeerLink:
    """The connection of one remote to the other nodes, from the constructor to close().

    ranks: of this node. publishes: this process publishes the node's address. store: the part of
    the job's store that belongs to the links of this dataset. secret_of: returns the job's secret.
    planned: the plan's readers of blobs. Raises ConfigError for an invalid secret.
    """

    def __init__(
        self,
        upstream: PeerUpstream,
        cache: DiskCache,
        *,
        ranks: NodeRanks,
        publishes: bool,
        store: JobStore | None,
        secret_of: Callable[[Peers], PeerSecret],
        planned: PlannedReaders | None = None,
    ) -> None:
        assert cache.peers is not None
        self._upstream, self._cache, self._settings = upstream, cache, cache.peers
        self._publishes, self._planned = publishes, planned
        self._server: PeerServer | None = None
        self._exchange: PeerExchange | None = None
        nodes = self._settings.nodes
        if ranks.end - ranks.first == ranks.size and len(nodes) <= 1:
            # Warn of settings that would fail in a job of several nodes, before a cluster is used.
            try:
                check_own_settings(self._settings)
            except ConfigError as error:
                warn(f"{error} This job has one node, so it continues without peers.")
        elif store is None and not nodes:
            warn(
                f"{cache.path}: this loader's {ranks.size} ranks aren't those of a process group, "
                "through which their nodes could exchange addresses, so each node fetches all data "
                "from the remote. Initialise torch.distributed first and leave world= out, or list "
                "the nodes: Peers(…, nodes=[…])."
            )
        else:
            try:
                self._begin(secret_of(self._settings), ranks, store)
            except JobStoreError as error:
                warn(f"{error} Each node fetches all data from the remote.")
            except BaseException:  # such as an interrupt of the wait for others
                self.close()
                raise

    def _begin(self, secret: PeerSecret, ranks: NodeRanks, store: JobStore | None) -> None:
        """Serve the other nodes, and use their caches."""
        address = self._serve(secret)
        if nodes := self._settings.nodes:
            own = self._settings.address
            peers = [Peer(number, node) for number, node in enumerate(nodes) if node != own]
        else:
            assert store is not None
            self._exchange = exchange = PeerExchange(store, ranks)
            self._publish(address)
            peers = self._read_peers(exchange, _ADDRESSES_S)
        credentials = credentials_of(self._settings, secret)
        client = PeerClient(secret, tls=None if credentials is None else credentials.client_context)
        self._upstream.use_peers(peers, client, planned=self._planned, look=self._look)

    def renew(self) -> None:
        """Update the list of nodes for a new epoch, without waiting."""
        self._upstream.renew()

    def _look(self) -> list[Peer] | None:
        try:
            return None if self._exchange is None else self._read_peers(self._exchange, 0.0)
        except JobStoreError:  # the job is ending: keep the known nodes
            self._exchange = None
            return None

    def _read_peers(self, exchange: PeerExchange, timeout_s: float) -> list[Peer]:
        # Several entries name this node's own server if the ranks that share a node are unknown.
        own = None if self._server is None else self._server.address
        peers = exchange.read_peers(timeout_s=timeout_s)
        return [peer for peer in peers if peer.address != own]

    def close(self) -> None:
        """Stop using the server. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _serve(self, secret: PeerSecret) -> str:
        """Start or find this node's server; return its address."""
        try:
            self._server = PeerServer(self._cache, self._settings, secret, moved=self._publish)
        except (OSError, StalledError, WorkerError) as error:
            warn(f"{error} The other nodes can't use this node's cache.")
            return _NO_SERVER
        return self._server.address

    def _publish(self, address: str) -> None:
        """Publish the server's current address."""
        if self._publishes and self._exchange is not None:
            with contextlib.suppress(JobStoreError):  # the job is ending
                self._exchange.publish(address)
