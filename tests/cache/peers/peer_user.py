"""A child process that uses a node's server until it is killed or its input ends."""

from __future__ import annotations

import json
import sys

from penstock.cache.base import Peers
from penstock.cache.disk import DiskCache
from penstock.cache.peers import PeerSecret, PeerServer


def main() -> None:
    """Read the folder and the secret from the standard input; print the server; wait."""
    report = json.loads(sys.stdin.readline())
    secret = PeerSecret.of_text(report["secret"], what="a test")
    cache = DiskCache(report["root"], max_bytes="1GiB")
    server = PeerServer(cache, Peers(report["address"], tls=report["tls"]), secret)
    sys.stdout.write(json.dumps({"pid": server.pid, "address": server.address}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    server.close()


if __name__ == "__main__":
    main()
