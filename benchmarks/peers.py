"""`python -m benchmarks.peers`: the cost of nodes that serve one another.

Measured are CPU-seconds per GB of the client and of the server, over loopback, plain and with TLS,
for ranges of 8 MiB, 1 MiB and 100 KB, and for 16 of 100 KB at a time; both sides check a CRC-32C.
For comparison, Penstock's client for web stores reads the same from nginx, if that is installed.
Also measured is the cost of filling a cache from another node, or from nginx, including checksums,
files and the catalogue. Cases take turns in rounds. Writes benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c
from rich.console import Console

from benchmarks import peer_fills
from benchmarks.peer_fills import fill
from benchmarks.record import RESULTS, write_result
from penstock import DiskCache
from penstock.cache.base import BlobSource, Peers, Segment, blob_key
from penstock.cache.peers import Peer, PeerClient, PeerSecret, PeerServer, make_credentials
from penstock.cache.stores import ConnectionPool, Hop, Proxies, Timeouts, WebClient, WebRequest
from penstock.pipeline.bench import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peer_fills import Filled
    from penstock.cache.disk import CacheFolder
    from penstock.cache.peers import Span

MIB = 2**20
BLOB_BYTES = 128 * MIB
IN_FLIGHT = 4
RANGES = {"8 MiB": (8 * MIB, 1), "1 MiB": (MIB, 1), "100 KB": (100_000, 1)}
"""Bytes of a range, and how many of a blob are asked for together."""
TOGETHER = {"16 x 100 KB": (100_000, 16)}
"""As batches ask for samples: only peers are asked so."""
_NOWHERE = "http://127.0.0.1:9/"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

_NGINX = """\
{user}daemon off; worker_processes 1; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; sendfile on; keepalive_requests 1000000;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    server {{ listen 127.0.0.1:{port}{tls}; root {root}; }}
}}
"""


@dataclass(frozen=True)
class Case:
    """One server and its client. fetch: fetches spans of bytes, checked. fill: fills a cache in a
    folder, like `peer_fills.fill`; None if that isn't measured. pids: of the server."""

    name: str
    fetch: Callable[[list[Span]], object]
    fill: Callable[[str], Filled] | None
    pids: Callable[[], list[int]]


def cpu_s(pids: list[int]) -> float:
    """Return the CPU-seconds that processes have used, all threads."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def play(case: Case, range_bytes: int, together: int, total_bytes: int) -> dict[str, float]:
    """Fetch ranges at random pages, some at a time; return the cost."""
    rng = np.random.default_rng(range_bytes)
    count = max(IN_FLIGHT, total_bytes // (range_bytes * together))
    unit = MIB if range_bytes >= MIB else 4096  # as fills ask, and batches
    places = BLOB_BYTES // unit - -(-range_bytes // unit)
    step = -(-range_bytes // unit)
    wanted = [
        [(unit * int(at), unit * int(at) + range_bytes) for at in sorted(some)]
        for some in (
            rng.choice(places // step, together, replace=False) * step for _ in range(count)
        )
    ]
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(case.fetch, wanted[: 2 * IN_FLIGHT]))
        began_s, mine_s, theirs_s = time.monotonic(), time.process_time(), cpu_s(case.pids())
        list(threads.map(case.fetch, wanted))
        mine_s, theirs_s = time.process_time() - mine_s, cpu_s(case.pids()) - theirs_s
        took_s = time.monotonic() - began_s
    size_gb = count * together * range_bytes / 1e9
    return {
        "client": mine_s / size_gb,
        "server": theirs_s / size_gb,
        "both": (mine_s + theirs_s) / size_gb,
        "mb_per_s": 1000 * size_gb / took_s,
    }


@contextlib.contextmanager
def penstock(folder: str, data: bytes, *, tls: bool) -> Iterator[Case]:
    """Run a node's server with the client of other nodes."""
    key = blob_key(scope="", uri="memory://peers", version="")
    blob = BlobSource(
        key=key,
        uri="memory://peers",
        segments=[Segment(path="", size_bytes=len(data), version=None)],
        size_bytes=len(data),
    )
    secret, peers = PeerSecret.draw(), Peers("127.0.0.1:0", tls=tls)
    cache = DiskCache(os.path.join(folder, f"cache-{tls}"), max_bytes="2GiB", peers=peers)
    fills = min(len(data), peer_fills.MOST_BLOB_BYTES)
    stock = [] if tls else [peer_fills.blob(n, fills) for n in range(peer_fills.BLOBS)]
    for one in (blob, *stock):
        part = memoryview(data)[: one.size_bytes]
        cache.use(functools.partial(_put, blob=one, data=part))
    server = PeerServer(cache, peers, secret)
    context = make_credentials(secret).client_context() if tls else None
    client = PeerClient(secret, tls=None if context is None else lambda: context)
    peer = Peer(0, server.address)
    try:
        yield Case(
            f"penstock, {'TLS' if tls else 'plain'}",
            lambda spans: _held(client.blob(peer, key, spans, len(data))),
            None if tls else lambda place: fill(place, _NOWHERE, server.address, secret, fills),
            lambda: [server.pid],
        )
    finally:
        client.abort()
        server.close()
        cache.close()


def _put(shelf: CacheFolder, blob: BlobSource, data: memoryview) -> None:
    shelf.put(blob, data, group=peer_fills.GROUP, kept=False)


def _held(data: list[memoryview] | None) -> None:
    if data is None:
        raise RuntimeError("the server doesn't have the blob that was written")


@contextlib.contextmanager
def nginx(folder: str, data: bytes, *, tls: bool) -> Iterator[Case]:
    """Run nginx for comparison: files by sendfile; only the client checks what it reads."""
    place = os.path.join(folder, f"nginx-{tls}")
    os.makedirs(os.path.join(place, "root"))
    Path(place, "root", "blob").write_bytes(data)
    fills = min(len(data), peer_fills.MOST_BLOB_BYTES)
    for number in range(0 if tls else peer_fills.BLOBS):
        Path(place, "root", peer_fills.blob(number, fills).uri).write_bytes(data[:fills])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    credentials = make_credentials(PeerSecret.draw())
    Path(place, "cert.pem").write_text(credentials.certificate)
    Path(place, "key.pem").write_text(credentials.key)
    secured = f" ssl; ssl_certificate {place}/cert.pem; ssl_certificate_key {place}/key.pem"
    Path(place, "conf").write_text(
        _NGINX.format(
            user="user root; " if os.geteuid() == 0 else "",
            place=place,
            port=port,
            tls=secured + "; ssl_protocols TLSv1.3" if tls else "",
            root=os.path.join(place, "root"),
        )
    )
    assert NGINX is not None
    command = [NGINX, "-p", place, "-c", os.path.join(place, "conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    context = credentials.client_context()
    timeouts = Timeouts(connect_s=10, read_s=30, whole_s=60)
    client = WebClient(ConnectionPool(timeouts=timeouts, tls=lambda: context, proxies=Proxies()))
    url = f"http{'s' if tls else ''}://127.0.0.1:{port}/blob"

    def fetch(spans: list[Span]) -> None:
        ((start, end),) = spans
        own = {"Range": f"bytes={start}-{end - 1}"}
        with contextlib.closing(client.ask(Hop(url), WebRequest(own))) as reply:
            crc32c(reply.read(end - start))

    def pids() -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [process.pid, *map(int, children.split())]

    try:
        _until_it_listens(port)
        store = url.rpartition("/")[0]
        yield Case(
            f"nginx, {'TLS' if tls else 'plain'}",
            fetch,
            None if tls else lambda place: fill(place, store, "", PeerSecret.draw(), fills),
            pids,
        )
    finally:
        client.abort()
        process.terminate()
        process.wait(10)


def _until_it_listens(port: int) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return


def play_fill(case: Case, folder: str) -> dict[str, float]:
    """Fill a cache; return the cost."""
    assert case.fill is not None
    before_s = cpu_s(case.pids())
    filled = case.fill(folder)
    size_gb = filled.size_bytes / 1e9
    server = (cpu_s(case.pids()) - before_s) / (size_gb / peer_fills.SHARE)
    client = filled.cpu_s / size_gb
    return {
        "client": client,
        "server": server,
        "both": client + server,
        "mb_per_s": 1000 * size_gb / filled.took_s,
    }


def measure(*, rounds: int, total_bytes: int, results: Path, console: Console) -> Path:
    """Play the rounds in rotating order, print a table and write the result. Returns its path."""
    data = np.random.default_rng(1).bytes(BLOB_BYTES)
    played: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        kinds = [penstock] if NGINX is None else [penstock, nginx]
        cases = [
            stack.enter_context(kind(folder, data, tls=tls))
            for tls in (False, True)
            for kind in kinds
        ]
        for number in range(rounds):
            for case in cases if number % 2 == 0 else cases[::-1]:
                ranges = RANGES if case.name.startswith("nginx") else RANGES | TOGETHER
                for name, (size, together) in ranges.items():
                    least = total_bytes if size >= MIB else total_bytes // 4
                    report = play(case, size, together, least)
                    played.setdefault((case.name, name), []).append(report)
                if case.fill is not None:
                    report = play_fill(case, folder)
                    played.setdefault((case.name, "filling"), []).append(report)
    found: dict[str, dict[str, Any]] = {}
    for (case_name, name), runs in played.items():
        figures = {what: Figure.of([run[what] for run in runs]) for what in runs[0]}
        found.setdefault(case_name, {})[name] = {k: asdict(v) for k, v in figures.items()}
        console.print(
            f"{case_name:15} {name:>11}: client {figures['client'].median:.2f} + server "
            f"{figures['server'].median:.2f} = {figures['both'].median:.2f} CPU-s a GB, "
            f"{statistics.median(run['mb_per_s'] for run in runs):,.0f} MB/s",
            highlight=False,
        )
    settings = {"rounds": rounds, "in_flight": IN_FLIGHT, "bytes": total_bytes}
    return write_result(
        "peers", settings | {"cpu_s_per_gb": found}, folder=results, distributions=["cryptography"]
    )


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, for a quick check")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    quick = options.quick
    measure(
        rounds=1 if quick else options.rounds,
        total_bytes=64 * MIB if quick else 2**30,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
