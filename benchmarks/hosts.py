"""Hosts for trials of many nodes on one machine: network namespaces with links of a given rate.

Each host has an address of its own on a bridge; what it sends and receives is shaped by the kernel
(a token bucket), so a link that is full is as slow as a real one. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LATENCY = "200ms"  # of a bucket's queue: beyond it packets are dropped, as a switch does
_NETWORK = "10.231.7"


def why_not() -> str | None:
    """Say why there can be no hosts here; None where there can."""
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
    """A host is a network namespace with one address. number: of the host, from 0."""

    number: int

    @property
    def namespace(self) -> str:
        """Its name, as `ip netns` has it."""
        return _name(f"h{self.number}")

    @property
    def address(self) -> str:
        """Its address on the hosts' network."""
        return f"{_NETWORK}.{self.number + 10}"

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

    def kill(self) -> None:
        """Kill every process on this host, as a node that loses its power."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def set_rate(self, bits_per_s: float | None) -> None:
        """Bound what the host sends and what it receives, each; None: as fast as it goes."""
        outside, inside = f"pk{os.getpid()}o{self.number}", "eth0"
        for where in ((), ("netns", "exec", self.namespace)):
            device = inside if where else outside
            tool = ["ip", *where, "tc"] if where else ["tc"]
            subprocess.run(
                [*tool, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False
            )
            if bits_per_s is not None:
                burst = max(64 * 1024, int(bits_per_s / 8 / 100))
                shape = ["rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", _LATENCY]
                _run([*tool, "qdisc", "add", "dev", device, "root", "tbf", *shape])

    def received_bytes(self) -> int:
        """What has come over its link so far, headers among it."""
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        found = _run(["ip", "netns", "exec", self.namespace, "cat", path])
        return int(found)


@contextlib.contextmanager
def hosts(count: int, *, bits_per_s: float | None = None) -> Iterator[list[Host]]:
    """So many hosts on one bridge, gone afterwards. bits_per_s: of each link, either way."""
    made = [Host(number) for number in range(count)]
    bridge = f"pk{os.getpid()}b"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in made:
            _connect(host, bridge)
            host.set_rate(bits_per_s)
        yield made
    finally:
        for host in made:
            host.kill()
            subprocess.run(
                ["ip", "netns", "delete", host.namespace], capture_output=True, check=False
            )
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


def _connect(host: Host, bridge: str) -> None:
    outside = f"pk{os.getpid()}o{host.number}"
    _ip("netns", "add", host.namespace)
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("link", "set", outside, "master", bridge, "up")
    inside = ("-n", host.namespace)
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "link", "set", "lo", "up")


def _name(what: str) -> str:
    return f"penstock-{os.getpid()}-{what}"


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
