"""Maps of files, up to the interpreter's exit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from penstock.cache.base import FileMap, map_file
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_what_looks_into_a_map_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"penstock")
    calls: list[str] = []
    with (tmp_path / "file").open("rb") as file:
        mapped = FileMap(file.fileno(), on_unmap=lambda: calls.append("gone"))
    buffer = mapped.buffer()
    del mapped
    assert bytes(memoryview(buffer)) == b"penstock"
    assert calls == []
    del buffer
    assert calls == ["gone"]
    assert bytes(memoryview(map_file(str(tmp_path / "file")).buffer())) == b"penstock"


@pytest.mark.parametrize("keeper", ["threading", "os", "abc", "__main__"])
def test_a_cached_blob_that_lives_to_the_exit_says_nothing(tmp_path: Path, keeper: str) -> None:
    """Whatever module of Python's keeps it, and so whichever of ours are gone before it."""
    program = """
        import importlib, sys
        from penstock.cache.base import BlobSource, Segment
        from penstock.cache.disk import CacheFolder

        folder = CacheFolder(sys.argv[1], max_bytes=2**24)
        segment = Segment(path="x", size_bytes=5, version=None)
        source = BlobSource(key="ab" * 20, uri="mem://x", segments=(segment,), size_bytes=5)
        assert folder.writer.put(source, memoryview(b"hello"), group="g", kept=False)
        other = BlobSource(key="cd" * 20, uri="mem://y", segments=(segment,), size_bytes=5)
        begun = folder.writer.begin(other, group="g", pinned=True)
        kept = [folder, folder.lookup.find(source.key, 5), begun]
        importlib.import_module(sys.argv[2]).penstock_kept = kept
        del folder, kept, begun
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "c"), keeper],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
