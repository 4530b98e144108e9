"""`penstock doctor --serve-peer`: stands in for a job's node, so that the way there can be tried.

Servers run with jobs and warm-ups alone; who sets up a cluster wants to know before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from typing import TYPE_CHECKING

import typer

from penstock.cache.errors import ConfigError, WorkerError
from penstock.pipeline.cli.doctor_peer import secret_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.cache.base.peer_settings import Peers
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.peers.tokens import PeerSecret

SERVED_S = 600.0


def serve(settings: Peers, folder: Path | None, *, stop: threading.Event | None = None) -> None:
    """Serve as a job's node does, for ten minutes or until it is interrupted: a cache folder, or
    16 MiB of a temporary one. Raises ConfigError, WorkerError, OSError, StalledError."""
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.layout import Layout

    if (secret := secret_of(settings)) is None:
        raise ConfigError(
            f"--serve-peer {settings.address}: got no secret, wanted --peer-token-file FILE or "
            "PENSTOCK_PEER_TOKEN, the same on both nodes. Make one with `python -c 'import "
            "secrets; print(secrets.token_hex(32))' > FILE; chmod 600 FILE`."
        )
    if folder is not None:
        if not Layout.is_cache(str(folder)):
            raise ConfigError(
                f"--serve-peer {settings.address}: got {folder}, which is no cache folder, and "
                "none is made. Pass the folder of the job's DiskCache, or none: then 16 MiB of a "
                "temporary one are served."
            )
        _serve(settings, secret, DiskCache.at(folder, peers=settings), stop)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as made:
        cache = DiskCache(made, max_bytes="64MiB", peers=settings)
        _put_sample(cache)
        _serve(settings, secret, cache, stop)


def _put_sample(cache: DiskCache) -> None:
    from penstock.cache.base.blob import BlobSource, Segment
    from penstock.cache.peers.probe import RANGE_BYTES

    segment = Segment(path="sample", size_bytes=RANGE_BYTES, version=None, object_bytes=None)
    blob = BlobSource(
        key=os.urandom(20).hex(), uri="sample", segments=[segment], size_bytes=RANGE_BYTES
    )
    data = memoryview(os.urandom(RANGE_BYTES))
    cache.use(lambda shelf: shelf.filling.put(blob, data, group="0" * 32, kept=False))


def _serve(
    settings: Peers, secret: PeerSecret, cache: DiskCache, stop: threading.Event | None
) -> None:
    from penstock.cache.peers.server_process import PeerServer

    try:
        server = PeerServer(cache, settings, secret)
        try:
            if settings.port and server.address != settings.address:
                raise WorkerError(
                    f"--serve-peer {settings.address}: the port is taken, by another program or "
                    "by the server of a job, which penstock doctor --peer can ask from elsewhere."
                )
            spoken = "TLS" if server.is_encrypted else "plain HTTP"
            typer.echo(
                f"serving at {server.address} ({spoken}) for {SERVED_S / 60:.0f} minutes; Ctrl-C "
                "ends it. On another node, with the same secret:\n"
                f"  penstock doctor --peer {server.address} --peer-token-file FILE",
                err=True,
            )
            with contextlib.suppress(KeyboardInterrupt), _ended_by_signals():
                (stop or threading.Event()).wait(SERVED_S)
        finally:
            server.close()
    finally:
        cache.close()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have `kill`, `timeout` and a closed terminal end it as Ctrl-C does: with its folder."""
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
