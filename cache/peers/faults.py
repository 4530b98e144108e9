"""What keeps this side from being served by another node's server, and what to do. Pure."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.cache.peers.probe import PeerFacts

SPEECH = {"tls": "TLS", "plain": "plain HTTP"}
_NO_ROUTE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES}
)


class Fault(NamedTuple):
    """At which stage a connection fails, what was found there, and what to do."""

    stage: str
    found: str
    remedy: str


def fault_of(facts: PeerFacts) -> Fault | None:
    """What is wrong with the way to a server; None where this side is served, or nobody knows."""
    if facts.failure is not None:
        return _unreached(facts, facts.failure)
    return _speech(facts) or _secret(facts)


def _unreached(facts: PeerFacts, error: OSError) -> Fault:
    host, _, port = facts.address.rpartition(":")
    if isinstance(error, ConnectionRefusedError):
        return Fault(
            "peer",
            "that machine answers, but nothing listens at this port",
            "A node serves while a job or a warm-up runs there, at the address in Peers(…) or "
            "--peers; where the port was taken, at another that its log names. To try the way "
            f"before a job: penstock doctor --serve-peer {facts.address} --peer-token-file FILE on "
            "that node, then this again. If it serves now, a firewall refuses.",
        )
    if isinstance(error, socket.gaierror):
        return Fault(
            "peer",
            f"nobody knows the name {host} ({error.strerror})",
            "Pass the address in numbers, or put the name into DNS or /etc/hosts of each node.",
        )
    if error.errno in _NO_ROUTE:
        return Fault(
            "peer",
            f"there is no way to that machine ({error.strerror})",
            f"Is it up, and in a network of this one's? Some firewalls answer so, too: open TCP "
            f"port {port} between the nodes.",
        )
    silent = isinstance(error, TimeoutError)
    return Fault(
        "peer",
        "no answer" if silent else f"no connection ({error.strerror or error})",
        f"Most often a firewall that drops packets: open TCP port {port} between the nodes "
        "(security group, network policy, nftables). Else the machine is down, or the address is "
        "of a network that this one doesn't reach: a job's nodes need one in common.",
    )


def _speech(facts: PeerFacts) -> Fault | None:
    theirs, ours = SPEECH.get(facts.speech), SPEECH["tls" if facts.wants_tls else "plain"]
    if theirs is None:
        silent = facts.speech == "silence"
        return Fault(
            "speaks",
            "it takes the connection and says nothing" if silent else "nothing that a node says",
            "Is that machine overloaded, or does something between the nodes take connections for "
            "it (a load balancer, a proxy)?"
            if silent
            else "Another program has that port: give the nodes one that is free on all of them.",
        )
    if theirs == ours:
        return None
    return Fault(
        "speaks",
        f"{theirs}, and this side would speak {ours}",
        "Say the same on all nodes: tls=False in Peers(…), --no-tls in commands, only where the "
        "network is private. Addresses of the machine itself (127.0.0.1) are plain unless told.",
    )


def _secret(facts: PeerFacts) -> Fault | None:
    if facts.welcome in ("same", "unchecked"):
        return None
    if facts.welcome == "name":
        return Fault(
            "secret",
            "its certificate is for another address",
            "Ask it by the address that it has in Peers(…) or --peers, letter by letter.",
        )
    if facts.welcome == "clock":
        return Fault(
            "secret",
            "its certificate isn't valid today",
            "Set the clocks of both machines (NTP); renew certificates of your own.",
        )
    return Fault(
        "secret",
        "another one than here (or certificates that don't belong together)",
        "Copy one token file to all nodes. If they have it: another job's server has the port, "
        "and this job's listens at another, which its log names. Give jobs one token file, or "
        "each a port of its own.",
    )
