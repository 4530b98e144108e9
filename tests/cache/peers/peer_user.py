"""A child process that uses a node's server until it is killed or its input ends."""

from __future__ import annotations

import json
import sys

from penstock.cache.base import Peers
from penstock.cache.disk import DiskCache
from penstock.cache.peers import PeerSecret, PeerServer


def main() -> None:
    """Read where and with what secret from the standard input; say what serves; wait."""
    told = json.loads(sys.stdin.readline())
    secret = PeerSecret.of_text(told["secret"], what="a test")
    cache = DiskCache(told["root"], max_bytes="1GiB")
    server = PeerServer(cache, Peers(told["address"], tls=told["tls"]), secret)
    sys.stdout.write(json.dumps({"pid": server.pid, "address": server.address}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    server.close()


if __name__ == "__main__":
    main()
