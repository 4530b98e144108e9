"""Ties a dataset's remote to the caches of the job's other nodes: whom it asks, who serves them.

Nothing listens and nobody is asked before `begin`. Where the other nodes can't be learnt the job
goes on from the remote, with one warning.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

from penstock.cache.errors import (
    ConfigError,
    JobStoreError,
    PenstockWarning,
    StalledError,
    WorkerError,
)
from penstock.cache.peers.certificates import credentials_of
from penstock.cache.peers.own_settings import check_own_settings
from penstock.cache.peers.peer_client import PeerClient
from penstock.cache.peers.peer_directory import Peer
from penstock.cache.peers.peer_exchange import PeerExchange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.peer_settings import Peers
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.job_store import JobStore
    from penstock.cache.peers.peer_directory import PlannedHolders
    from penstock.cache.peers.peer_exchange import NodeRanks
    from penstock.cache.peers.peer_upstream import PeerUpstream
    from penstock.cache.peers.server_process import PeerServer
    from penstock.cache.peers.tokens import PeerSecret

_ADDRESSES_S = 15.0
"""So long the first pass waits for the other nodes' addresses."""


class PeerLink:
    """One remote's tie to the other nodes, from begin() to close().

    ranks: of this node; speaks: this process does for it. store: a part of the job's that all
    nodes' links of this dataset share, and no others.
    """

    def __init__(
        self,
        upstream: PeerUpstream,
        cache: DiskCache,
        *,
        ranks: NodeRanks,
        speaks: bool,
        store: JobStore | None,
    ) -> None:
        assert cache.peers is not None
        self._upstream, self._cache, self._settings = upstream, cache, cache.peers
        self._ranks, self._speaks, self._store = ranks, speaks, store
        self._server: PeerServer | None = None
        self._exchange: PeerExchange | None = None
        self._held: Callable[[], str] = str
        self._planned: PlannedHolders | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the job has other nodes."""
        return not self._ranks.is_alone or len(self._settings.nodes) > 1

    def begin(
        self,
        secret_of: Callable[[Peers], PeerSecret],
        *,
        planned: PlannedHolders | None = None,
        held: Callable[[], str] = str,
    ) -> None:
        """Serve the others, and have the upstream ask them. secret_of: the job's secret. planned:
        what the plan says of them. held: what this node holds, in words for the others' plans.
        Raises ConfigError for a secret or certificates that can't be."""
        if not self.is_needed:
            self._check_own()
            return
        if self._server is not None:
            return
        self._held, self._planned = held, planned
        if self._store is None and not self._settings.nodes:
            _warn(
                f"{self._cache.path}: this loader's {self._ranks.size} ranks aren't those of a "
                "process group, through which their nodes could tell one another their addresses, "
                "so each fetches all that it needs from the remote. Initialise torch.distributed "
                "first and leave world= out, or list the nodes: Peers(…, nodes=[…])."
            )
            return
        try:
            secret = secret_of(self._settings)
            address = self._serve(secret)
            peers = self._listed() if self._settings.nodes else self._exchanged(address)
            credentials = credentials_of(self._settings, secret)
        except JobStoreError as error:
            _warn(f"{error} Nodes fetch all that they need from the remote.")
            return
        except BaseException:  # such as an interrupt of the wait for others
            self.close()
            raise
        tls = None if credentials is None else credentials.client_context
        client = PeerClient(secret, tls=tls)
        self._upstream.know(self._others(peers), client, planned=planned, look=self._look)

    def _check_own(self) -> None:
        """Say what would be wrong where the job had other nodes: that is when it is noticed else,
        by whoever waits for the cluster."""
        try:
            check_own_settings(self._settings)
        except ConfigError as error:
            _warn(f"{error} This job has one node, so it goes on without.")

    def renew(self) -> None:
        """Look who is there by now; waits for nobody."""
        self._upstream.renew()

    def _look(self) -> list[Peer] | None:
        exchange = self._exchange
        try:
            return None if exchange is None else self._others(self._hear(exchange, 0.0))
        except JobStoreError:  # the job's end: those that are known are asked on
            self._exchange = None
            return None

    def _hear(self, exchange: PeerExchange, timeout_s: float) -> list[Peer]:
        peers = exchange.hear(timeout_s=timeout_s)
        if self._planned is not None and (words := exchange.new_words()):
            self._planned.hear(words)
        return peers

    def _others(self, peers: list[Peer]) -> list[Peer]:
        """Those that aren't this node's own: where nobody told which ranks share a node, several
        have one server."""
        mine = None if self._server is None else self._server.address
        return [peer for peer in peers if peer.address != mine]

    def plan_again(self) -> None:
        """Ask the plan again who has what: it is another epoch."""
        self._upstream.directory.plan_again()

    def close(self) -> None:
        """Let the server go. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _serve(self, secret: PeerSecret) -> str | None:
        """The address of this node's server; None where the cache can't be served."""
        from penstock.cache.peers.server_process import PeerServer  # nobody else needs it

        try:
            self._server = PeerServer(self._cache, self._settings, secret, moved=self._tell)
        except (OSError, StalledError, WorkerError) as error:
            _warn(f"{error} The other nodes get nothing from this one.")
            return None
        return self._server.address

    def _tell(self, address: str) -> None:
        """Tell the others where the server listens now."""
        if self._speaks and self._exchange is not None:
            with contextlib.suppress(JobStoreError):  # the job's end
                self._exchange.tell(address, held=self._held())

    def _listed(self) -> list[Peer]:
        nodes = self._settings.nodes
        return [
            Peer(node, address)
            for node, address in enumerate(nodes)
            if address != self._settings.address
        ]

    def _exchanged(self, address: str | None) -> list[Peer]:
        assert self._store is not None
        self._exchange = exchange = PeerExchange(self._store, self._ranks)
        self._tell(address or "")  # where there is none, nobody waits for it
        return self._hear(exchange, _ADDRESSES_S)


def _warn(text: str) -> None:
    warnings.warn(text, PenstockWarning, stacklevel=3)
