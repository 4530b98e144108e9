"""`python -m benchmarks.store_server FOLDER LATENCY_S BYTES_PER_S [ADDRESS]`: run a slow store.

It answers GET and HEAD with single ranges and etags. Every answer waits for the latency; all
answers share the bandwidth. It prints its port, then for each line on its standard input the bytes
of bodies sent so far, and ends when the standard input ends.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK = 64 * 2**10


class Bandwidth:
    """Bytes per second, shared: each sender waits until its bytes may be sent."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def pause_s(self, size_bytes: int) -> float:
        """Return how long to wait before sending so many bytes."""
        with self._lock:
            self.sent_bytes += size_bytes
            now = time.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + size_bytes / self._bytes_per_s
            return self._free_at - now


class Handler(BaseHTTPRequestHandler):
    """A handler for the files of one folder."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, *args: object, folder: str, latency_s: float, bandwidth: Bandwidth) -> None:
        self._folder, self._latency_s, self._bandwidth = folder, latency_s, bandwidth
        self._never = threading.Event()
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *args: object) -> None:
        """Log nothing, because logging would change the measurement."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self._never.wait(self._latency_s)
        path = os.path.join(self._folder, unquote(urlsplit(self.path).path).lstrip("/"))
        if not os.path.isfile(path):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = os.path.getsize(path)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, size)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{size:x}-{os.stat(path).st_mtime_ns:x}"')
        self.end_headers()
        if with_body:
            with open(path, "rb") as file:
                file.seek(start)
                while start < end:
                    data = file.read(min(_CHUNK, end - start))
                    self._never.wait(self._bandwidth.pause_s(len(data)))
                    self.wfile.write(data)
                    start += len(data)


def main() -> None:
    """Serve until the standard input ends. A line on it requests the bytes sent so far."""
    folder, latency_s, bytes_per_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    address = sys.argv[4] if len(sys.argv) > 4 else "127.0.0.1"
    bandwidth = Bandwidth(bytes_per_s)
    handler = partial(Handler, folder=folder, latency_s=latency_s, bandwidth=bandwidth)
    server = ThreadingHTTPServer((address, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="store")
    thread.start()
    print(server.server_address[1], flush=True)
    for _ in sys.stdin:
        print(bandwidth.sent_bytes, flush=True)
    server.shutdown()
    thread.join(10)


if __name__ == "__main__":
    main()
