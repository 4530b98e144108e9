"""Hosts for trials of many nodes on one machine: network namespaces with links of a given rate.

Each host has two links, like the nodes of a cluster: one for data, shaped by the kernel (a token
bucket, so that a full link is as slow as a real one), and one for the communication of the ranks,
which is unshaped. With one link for both, a collective of 1 byte would wait behind the queue of the
bucket, and a trial would measure that. Requires root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LATENCY = "200ms"  # of a bucket's queue: beyond it packets are dropped, as a switch does
_DATA, _TALK = "10.231.7", "10.231.8"
TALK_DEVICE = "eth1"
"""The device for collectives and stores."""


def why_not() -> str | None:
    """Return why hosts can't be made on this machine; None if they can."""
    if os.geteuid():
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian's package iproute2)"
    made = subprocess.run(["ip", "netns", "add", _name("probe")], capture_output=True, check=False)
    if made.returncode:
        return f"network namespaces can't be made: {made.stderr.decode().strip()}"
    _ip("netns", "delete", _name("probe"))
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """A host is a network namespace with two links. number: of the host, from 0."""

    number: int

    @property
    def namespace(self) -> str:
        """Its name in `ip netns`."""
        return _name(f"h{self.number}")

    @property
    def address(self) -> str:
        """Its address on the network for data."""
        return f"{_DATA}.{self.number + 10}"

    @property
    def talk_address(self) -> str:
        """Its address on the network for the communication of the ranks."""
        return f"{_TALK}.{self.number + 10}"

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a process group of its own. more: as for Popen."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            env={**os.environ, **(env or {})},
            text=True,
            start_new_session=True,
            **more,
        )

    def pids(self) -> list[int]:
        """Return the processes on this host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def kill(self) -> None:
        """Kill every process on this host, like a power failure; repeat until none is left, as one
        may have started another meanwhile."""
        for _ in range(100):
            if not (pids := self.pids()):
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit the rates of sending and of receiving; None for no limit."""
        self.set_send_rate(bits_per_s)
        _shape(["tc"], self._outside, bits_per_s)

    def set_send_rate(self, bits_per_s: float | None) -> None:
        """Limit the rate of sending; None for no limit."""
        _shape(["ip", "netns", "exec", self.namespace, "tc"], "eth0", bits_per_s)

    def cut_off(self) -> None:
        """Remove its data link like a pulled cable: no connection is closed."""
        _ip("link", "set", self._outside, "down")

    @property
    def _outside(self) -> str:
        return f"pk{os.getpid()}o{self.number}"

    def received_bytes(self) -> int:
        """Return the bytes received over its link so far, headers included."""
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        found = _run(["ip", "netns", "exec", self.namespace, "cat", path])
        return int(found)


@contextlib.contextmanager
def hosts(count: int, *, bits_per_s: float | None = None) -> Iterator[list[Host]]:
    """Make hosts on the same two networks, and remove them afterwards. bits_per_s: of each link for
    data, in each direction."""
    made = [Host(number) for number in range(count)]
    bridges = [f"pk{os.getpid()}b", f"pk{os.getpid()}c"]
    try:
        for bridge in bridges:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
        for host in made:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            own, talk = f"pk{os.getpid()}o{host.number}", f"pk{os.getpid()}t{host.number}"
            _connect(host, own, bridges[0], device="eth0", address=host.address)
            _connect(host, talk, bridges[1], device=TALK_DEVICE, address=host.talk_address)
            host.set_rate(bits_per_s)
        yield made
    finally:
        for host in made:
            host.kill()
            # A namespace and its links vanish some time after it was deleted: too late for the
            # next hosts.
            for kind in "ot":
                _try("link", "delete", f"pk{os.getpid()}{kind}{host.number}")
            _try("netns", "delete", host.namespace)
        for bridge in bridges:
            _try("link", "delete", bridge)


def _connect(host: Host, outside: str, bridge: str, *, device: str, address: str) -> None:
    _ip("link", "add", outside, "type", "veth", "peer", "name", device, "netns", host.namespace)
    _ip("link", "set", outside, "master", bridge, "up")
    inside = ("-n", host.namespace)
    _ip(*inside, "addr", "add", f"{address}/24", "dev", device)
    _ip(*inside, "link", "set", device, "up")


def _shape(tool: Sequence[str], device: str, bits_per_s: float | None) -> None:
    subprocess.run([*tool, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
    if bits_per_s is not None:
        burst = max(64 * 1024, int(bits_per_s / 8 / 100))
        shape = ["rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", _LATENCY]
        _run([*tool, "qdisc", "add", "dev", device, "root", "tbf", *shape])


def _name(what: str) -> str:
    return f"penstock-{os.getpid()}-{what}"


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _try(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=False)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
