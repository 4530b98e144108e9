"""Connect a dataset's remote to the caches of the job's other nodes: serve them, and find theirs.

Nothing listens and nobody is asked before `begin`. Where the other nodes can't be found the job
goes on from the remote, with one warning.

Addresses are exchanged through the job's store. Each node publishes its own once; the first node
waits for all, for a while, and publishes the list in one text: so the store answers one short
question a node, whatever their number. A node that comes later is on the list when it is read
again. What each holds is read once by each of the others.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base import check_address
from penstock.cache.errors import (
    ConfigError,
    JobStoreError,
    PenstockWarning,
    StalledError,
    WorkerError,
)
from penstock.cache.peers.certificates import credentials_of
from penstock.cache.peers.peer_client import PeerClient
from penstock.cache.peers.peer_directory import Peer
from penstock.cache.peers.server_control import check_own_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import Peers
    from penstock.cache.disk import DiskCache
    from penstock.cache.job_store import JobStore
    from penstock.cache.peers.peer_directory import PlannedHolders
    from penstock.cache.peers.peer_upstream import PeerUpstream
    from penstock.cache.peers.server_process import PeerServer
    from penstock.cache.peers.tokens import PeerSecret

_MOST_ENTRIES = 65_536
_NO_SERVER = ""
"""The address of a node whose cache can't be served, such as one with a full disk."""


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks [first, end) of a node, of so many in the job."""

    first: int
    end: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether it is the job's first node."""
        return self.first == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other node."""
        return self.end - self.first == self.size


class PeerExchange:
    """Tells and hears addresses for one node. Safe for several threads, as one may still wait for
    the store when the next one looks for late nodes. Every method raises JobStoreError."""

    def __init__(self, store: JobStore, ranks: NodeRanks) -> None:
        """store: under a name that all nodes give alike."""
        self._store, self._ranks = store, ranks
        self._seen = 0  # entries that the first node has put on its list
        self._told: dict[int, tuple[int, str]] = {}  # end of a node's ranks, and its address
        self._listed: dict[int, int] = {}  # other nodes, and the first rank of each
        self._heard: set[int] = set()  # those whose words were heard

    def tell(self, address: str, *, held: str = "") -> None:
        """Tell where this node's server listens, "" where there is none, so that nobody waits for
        it; and in words for the pipeline what it holds. Telling the same again changes nothing."""
        first = self._ranks.first
        if self._store.get(f"told-{first}") == address:
            return
        self._store.set_once(f"held-{first}", held or "-")
        number = self._store.add("entries", 1)
        self._store.set(f"entry-{number}", json.dumps([first, self._ranks.end, address]))
        self._store.set(f"told-{first}", address)

    def hear(self, *, timeout_s: float) -> list[Peer]:
        """The other nodes that have told; waits so long for those that haven't, or for the first
        node to list them."""
        until_s = time.monotonic() + timeout_s
        if self._ranks.leads:
            self._gather(until_s)
            told = sorted(self._told.copy().items())
            text = json.dumps([[first, *rest] for first, rest in told])
            self._store.set("all", text)
        else:
            self._store.wait(["all"], timeout_s=max(0.0, until_s - time.monotonic()))
        return self._others(self._store.get("all"))

    def new_words(self) -> dict[int, str]:
        """What nodes that were heard of said they hold, by node; each is told once."""
        new = {n: first for n, first in self._listed.items() if first not in self._heard}
        keys = [f"held-{first}" for first in new.values()]
        if not new or not self._store.has_all(keys):
            return {}
        self._heard.update(new.values())
        return dict(zip(new, self._store.get_all(keys), strict=True))

    def _gather(self, until_s: float) -> None:
        """Put entries on the list until all ranks' nodes are there, or the time is over."""
        while (number := self._seen + 1) <= _MOST_ENTRIES:
            entry = f"entry-{number}"
            left_s = until_s - time.monotonic()
            ranks = sum(end - first for first, (end, _) in self._told.copy().items())
            is_full = ranks >= self._ranks.size
            if not is_full and left_s > 0:
                self._store.wait([entry], timeout_s=left_s)
            found = _entry(self._store.get(entry))
            if found is None:
                return
            self._told[found[0]] = found[1:]
            self._seen = max(self._seen, number)  # another thread may be ahead

    def _others(self, text: str | None) -> list[Peer]:
        """The entries of other nodes. Nodes are numbered in the order of their ranks; where all
        have as many, so are those that are missing yet."""
        entries = [] if text is None else _entries(text)
        each = self._ranks.end - self._ranks.first
        alike = all(end - first == each and first % each == 0 for first, end, _ in entries)
        others = {
            first // each if alike else place: (first, address)
            for place, (first, _, address) in enumerate(entries)
            if first != self._ranks.first and address != _NO_SERVER
        }
        self._listed = {node: first for node, (first, _) in others.items()}
        return [Peer(node, address) for node, (_, address) in others.items()]


def _entry(text: str | None) -> tuple[int, int, str] | None:
    return None if text is None else _entries(f"[{text}]")[0]


def _entries(text: str) -> list[tuple[int, int, str]]:
    """What nodes told. Who can write to the store says whom this node asks, and nothing more."""
    try:
        found = [(first, end, address) for first, end, address in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise _damaged() from error
    for first, end, address in found:
        if type(first) is not int or type(end) is not int or not 0 <= first < end:
            raise _damaged()
        if address != _NO_SERVER:
            _check(address)
    return found


def _check(address: object) -> None:
    try:
        check_address(address, what="a node's address")
    except ConfigError as error:
        raise _damaged() from error


def _damaged() -> JobStoreError:
    return JobStoreError(
        "What the job's store says of the nodes' addresses isn't what Penstock writes: another "
        "program writes there, or some nodes run another version."
    )


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
