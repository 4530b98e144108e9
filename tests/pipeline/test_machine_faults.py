"""Faults of the machine (open files, memory, disks, rights): no data is blamed for them."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.augment import Resize, load_dali
from penstock.cache import PenstockWarning, ReadError, WriteError
from penstock.cache.base import file_map, is_shortage, machine_remedy
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import main
from penstock.pipeline.torch_data import is_sample_fault
from penstock.readers import Dataset
from penstock.readers.packing import pack
from tests import chunk_sets, images, tars
from tests.watchdog import PATIENCE_S, on_the_watchdogs_thread

if TYPE_CHECKING:
    from pathlib import Path

CODES = [errno.EMFILE, errno.EIO, errno.ENOMEM, errno.EACCES, errno.ESTALE]
CALLS = ("open", "pread", "preadv", "stat", "scandir", "fstat")


class Faults:
    """Calls that touch files below a folder, of which the at-th fails with an errno; 0: none."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self._folder = os.fsencode(folder)
        self.seen = self.at = self.code = 0
        for module, name in (*((os, name) for name in CALLS), (builtins, "open"), (io, "open")):
            patched.setattr(module, name, self._watched(getattr(module, name)))
        plain = file_map.libc_mmap

        def mmap(*args: Any) -> Any:
            if self._hits(args[4]):
                ctypes.set_errno(self.code)
                return file_map.MAP_FAILED
            return plain(*args)

        patched.setattr(file_map, "libc_mmap", mmap)

    def _watched(self, plain: Any) -> Any:
        def call(path: Any = ".", *args: Any, **named: Any) -> Any:
            if self._hits(path):
                raise OSError(self.code, os.strerror(self.code))
            return plain(path, *args, **named)

        return call

    def _hits(self, path: Any) -> bool:
        if not self.at or on_the_watchdogs_thread():
            return False
        with contextlib.suppress(OSError, TypeError):
            where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            self.seen += os.fsencode(where).startswith(self._folder)
            return self.seen == self.at and os.fsencode(where).startswith(self._folder)
        return False


def write(kind: str, root: Path) -> tuple[Path, dict[str, Any]]:
    """A dataset, and the options of its opening."""
    if kind == "folder":
        return images.class_folder(root, samples=12), {"verify": images.verify}
    if kind == "tar":
        return tars.tar_folder(root, samples=12), {"verify": images.verify}
    if kind == "pack":
        pack(images.class_folder(root.with_name("source"), samples=12), root, verify=images.verify)
        return root, {}
    root.mkdir()
    return root / chunk_sets.SETS[kind].write(root), {}


def read(url: Path, options: dict[str, Any], index: Path | None) -> tuple[int, int]:
    """Open a dataset with a new index, and read all: samples, bytes."""
    with Dataset(url, index=index) as dataset:
        dataset.open(**options)
        sizes = enumerate(dataset.index.sizes.tolist())
        rows = np.array([(shard, row) for shard, count in sizes for row in range(count)])
        found = dataset.read(rows)
        (column, *_) = found.columns.values()
        samples = getattr(column, "samples", None)
        return len(rows), sum(map(len, samples)) if samples is not None else 0


@pytest.mark.parametrize("kind", ["folder", "tar", "pack", "parquet", "arrow", "zarr 3", "npy"])
def test_every_fault_of_the_machine_names_it_and_blames_no_data(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = write(kind, tmp_path / "set")
    index = None if kind == "pack" else tmp_path / "index"
    with monkeypatch.context() as patched:
        faults = Faults(tmp_path / "set", patched)
        faults.at = -1
        wanted = read(url, options, index)
        total = faults.seen
        assert total > 2
        report = 0
        for number, at in enumerate(range(1, total + 1, max(1, total // 12))):
            shutil.rmtree(tmp_path / "index", ignore_errors=True)
            faults.code = CODES[number % len(CODES)]
            faults.seen, faults.at = 0, at
            raised: list[ReadError | WriteError] = []
            try:
                assert read(url, options, index) == wanted
            except (ReadError, WriteError) as error:
                raised.append(error)
            for each in raised:
                assert f"{tmp_path}/" in str(each)
                text = str(each).replace(str(tmp_path), "")
                assert os.strerror(faults.code) in text
                assert "ulimit -n" in text or faults.code != errno.EMFILE
                assert "pack" not in text.replace("pack.json", "")
                assert each.errno == faults.code or isinstance(each, WriteError)
            report += len(raised)
        assert report


def test_too_many_open_files_ends_training_and_makes_no_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.class_folder(tmp_path / "set", samples=24)
    with (
        Dataset(tmp_path / "set") as dataset,
        DataLoader(dataset, 4, seed=1, max_bad=1.0, augment=[Resize((16, 16))]) as loader,
        monkeypatch.context() as patched,
    ):
        assert sum(len(batch[0]) for batch in loader) == 24
        faults = Faults(tmp_path / "set", patched)
        faults.at, faults.code = 9, errno.EMFILE
        with pytest.raises(ReadError, match=r"\(Too many open files\).*ulimit -n"):
            list(loader)
        assert not loader.statistics().bad


LIMITED = """
import os, resource, sys
from penstock.pipeline.cli import main
main(["inspect", sys.argv[1]])
free = os.open("/dev/null", os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", ["inspect", "pack"])
def test_a_process_without_descriptors_left_hears_of_its_limit(
    tmp_path: Path, command: str
) -> None:
    write("pack", tmp_path / "set")
    more = [str(tmp_path / "again")] if command == "pack" else []
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            LIMITED,
            str(tmp_path / "set"),
            command,
            str(tmp_path / "set"),
            *more,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    report = " ".join(run.stderr.split())
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Too many open files" in report
    assert "ulimit -n" in report
    assert "Traceback" not in report
    assert "again into an empty" not in report


def test_an_index_that_its_disk_cant_read_isnt_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars.tar_folder(tmp_path / "set", samples=6)
    files = fsspec.filesystem("file", skip_instance_cache=True)

    def names() -> list[str]:
        with Dataset(tmp_path / "set", cache=tmp_path / "cache", filesystem=files) as dataset:
            dataset.open(verify=images.verify)
            return dataset.names(range(len(dataset)))

    wanted = names()
    real = open

    def fail(file: Any, *args: Any, **options: Any) -> Any:
        path = file if not isinstance(file, int) else os.readlink(f"/proc/self/fd/{file}")
        if b"sidecars" in os.fsencode(path) and args == ("rb",):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", fail)
        with pytest.warns(PenstockWarning, match="Input/output") as caught:
            assert names() == wanted
    assert "It is fetched or rebuilt, and the job continues" in str(caught[0].message)
    assert "damaged" not in str(caught[0].message)


def test_an_error_is_reported_without_a_descriptor_left_for_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("rich.console.Console.print", fail)
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err


def test_a_library_that_cant_be_opened_isnt_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *args: Any, **named: Any) -> Any:
        if name.startswith("nvidia"):
            raise ImportError(f"libdali.so: {os.strerror(errno.EMFILE)}")
        return plain(name, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", refuse)
        with pytest.raises(ReadError, match=r"DALI.*Too many open files.*ulimit -n"):
            load_dali()


def test_what_the_machine_is_to_blame_for() -> None:
    import pyarrow as pa

    assert is_shortage(ImportError(f"libdali.so: {os.strerror(errno.EMFILE)}"))
    for code in (*CODES, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOTCONN, errno.EPERM):
        error = OSError(code, os.strerror(code))
        assert machine_remedy(error) is not None
        assert not is_sample_fault(error)
    assert is_shortage(MemoryError())
    assert is_shortage(pa.ArrowMemoryError("malloc of size 4096 failed"))
    innocent: tuple[Exception, ...] = (
        OSError("Invalid IPC stream: negative continuation token"),
        pa.ArrowMemoryError(f"malloc of size {2**62} failed"),  # what only damaged bytes ask for
        FileNotFoundError(errno.ENOENT, "gone"),
        ValueError("damaged"),
        ImportError("No module named 'nvidia'"),
    )
    assert [machine_remedy(each) for each in innocent] == [None] * len(innocent)
