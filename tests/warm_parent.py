"""The process that tests/warm.py forks from. It imports, waits for messages and forks; run it as a
file."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import types
from typing import Any

if __name__ == "__main__":
    import fsspec  # noqa: F401
    import numpy  # noqa: F401
    import obstore  # noqa: F401
    import pyarrow  # noqa: F401
    import torch.distributed
    import torch.utils.data  # noqa: F401

    import penstock.augment
    import penstock.pipeline.cli.main
    import penstock.pipeline.feed.native_engine
    import penstock.pipeline.loader
    import penstock.readers.dataset  # noqa: F401
    from penstock import World  # noqa: F401

    with contextlib.suppress(ImportError):
        import nvidia.dali.fn
        import nvidia.dali.pipeline
        import nvidia.dali.types  # noqa: F401

        from penstock.augment import dali_nodes

        dali_nodes.is_compiled()  # loads numba and the kernels


def serve(link: socket.socket) -> dict[str, Any]:
    """Fork a child for each message until the connection closes. Returns in each child."""
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != link.fileno():
                poll.unregister(fd)
                os.close(fd)
                pid, status = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # its reader has ended
                    os.write(status, str(code).encode())
                os.close(status)
                continue
            message, fds, _, _ = socket.recv_fds(link, 2**20, 4)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                for handle, (_, status) in running.items():
                    os.close(handle)
                    os.close(status)
                link.close()
                return become(json.loads(message), fds)
            for one in fds[:3]:
                os.close(one)
            handle = os.pidfd_open(pid)
            running[handle] = (pid, fds[3])
            poll.register(handle, select.POLLIN)
            link.send(str(pid).encode())


def become(report: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Take over the input and outputs, the folder, variables and arguments of a message."""
    if report["new_session"]:
        os.setsid()
    for fd, one in enumerate(fds[:3]):
        os.dup2(one, fd)
    for one in fds:
        os.close(one)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(report["cwd"])
    os.environ.clear()
    os.environ.update(report["env"])
    sys.argv[:] = report["argv"]
    sys.path[0] = report["path"]
    if not report["destroys_libraries"]:
        # The interpreter ends as usual; then the C library calls _exit before all other handlers.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
    return report


if __name__ == "__main__":
    # What is here stays until the end of each child, whose collector need not look at it: that
    # would copy all of it.
    gc.collect()
    gc.freeze()
    _told = serve(socket.socket(fileno=int(sys.argv[1])))
    if _told["module"] is not None:
        import runpy

        runpy.run_module(_told["module"], run_name="__main__", alter_sys=True)
    else:
        _main = types.ModuleType("__main__")
        if _told["file"]:
            _main.__file__ = _told["file"]
        sys.modules["__main__"] = _main
        exec(compile(_told["code"], _told["file"] or "<string>", "exec"), _main.__dict__)
