"""A Ctrl-C leaves nothing behind, and a forked child is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from tests.servers import Server


_INTERRUPTED = """
import random, threading
from penstock.cache.base import FetchPolicy
from penstock.cache.fetch import Fetcher
from tests.cache.fetch.scripted import Scripted, answer, collect, numbered
started, stuck = threading.Event(), threading.Event()
def act(path, span):
    if path == "7": started.set()
    stuck.wait(30); return answer(path, span)
def tell():
    started.wait(30); print("started", flush=True)
teller = threading.Thread(target=tell)
teller.start()
fetcher = Fetcher(Scripted(act), policy=FetchPolicy(start_connections=8))
try:
    collect(fetcher, numbered(100))
except KeyboardInterrupt:
    stuck.set()
    fetcher.close()
    teller.join()
    names = [t.name for t in threading.enumerate()]
    print("left", names, fetcher.in_flight, flush=True)
"""


def test_ctrl_c_leaves_nothing_behind() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "left ['MainThread'] 0"


_FORKED = """
import os, sys
from penstock.cache.errors import FetchError
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store
url, options = sys.argv[1], eval(sys.argv[2])
store = open_store(url, options)
fetcher = Fetcher(store)
assert fetcher.info("0.bin") is not None
pid = os.fork()
if not pid:
    code = 1
    fetchers = lambda: fetcher, lambda: Fetcher(store), lambda: Fetcher(open_store(url, options))
    for make in fetchers:
        try:
            code += 10 * (len(make().fetch_object("0.bin").data) > 0)
        except FetchError as error:
            code += "forkserver" in str(error)
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert fetcher.info("0.bin") is not None
fetcher.close()
"""


@pytest.mark.parametrize(("scheme", "code"), [("s3", 4), ("http", 13)])
def test_a_forked_child_is_refused_with_the_remedy(server: Server, scheme: str, code: int) -> None:
    """A store of its own is refused only where obstore's threads would be needed."""
    url, options = server.s3("bucket/set"), server.s3_options
    if scheme == "http":
        url, options = f"{server.url}/bucket/set", {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKED, url, repr(options)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, f"{code}\n")
