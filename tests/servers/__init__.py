"""Remote stores for tests: real servers on loopback, at ports that the kernel chooses.

    with serving(folder) as server:            # HTTP and a little S3, in threads of this process
        open_store(server.url, {})             #   server.url: http://127.0.0.1:<port>
        open_store(server.s3("bucket/set"), server.s3_options)     # folder/bucket/set
        server.requests, server.bytes_sent     # counts of requests and of sent bytes; by path:
        server.requests_of["/bucket/set/x"]    #   server.bytes_of, server.answers (by status)
        server.faults = Faults(p=0.3, seed=1)  # 500, 503, 429, hangs, resets, … from now on
        server.go_away(); server.come_back()   # every connection refused, as of a dead machine
    with nginx(folder) as url: …               # fast; NGINX is None if it isn't installed
    with moto() as server: server.bucket("b"); open_store("s3://b", server.s3_options)

Faults are chosen by (seed, path, range, number of such requests before), so they don't depend on
the timing of threads. `latency_s` and `bytes_per_s` slow every answer down.
"""

from __future__ import annotations

from tests.servers.faulty import FAULTS, Faults, Server, serving
from tests.servers.moto import MotoServer, moto
from tests.servers.nginx import NGINX, nginx

__all__ = ["FAULTS", "NGINX", "Faults", "MotoServer", "Server", "moto", "nginx", "serving"]
