"""nginx-light of Debian: fast, and correct for ranges and conditions. See tests/servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

# tcp_nopush stays off: with it, runs of ranges stalled.
_CONFIGURATION = """\
{user}daemon off; worker_processes 1; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; sendfile on; keepalive_requests 1000000; default_type application/octet-stream;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    server {{ listen 127.0.0.1:{port}; absolute_redirect off; autoindex on; root {root}; }}
}}
"""


@contextlib.contextmanager
def nginx(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Serve a folder with index pages by nginx, in processes of its own; yield its URL."""
    if NGINX is None:
        raise RuntimeError("nginx isn't installed: skip where NGINX is None.")
    with tempfile.TemporaryDirectory() as place, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        port = listening.getsockname()[1]
        path = os.path.join(place, "nginx.conf")
        with open(path, "w") as file:
            # Root's worker would become "nobody", who can't read a test's private folder.
            user = "user root; " if os.geteuid() == 0 else ""
            root = os.fspath(folder)
            file.write(_CONFIGURATION.format(place=place, port=port, root=root, user=user))
        # nginx takes a listening socket over, as in its upgrades: no race for the port.
        fd = listening.fileno()
        process = subprocess.Popen(
            [NGINX, "-p", place, "-c", path],
            env={**os.environ, "NGINX": f"{fd};"},
            pass_fds=[fd],
            stderr=subprocess.DEVNULL,
        )
        listening.close()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
