"""A mount that fails is never taken for an empty folder or a missing file."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ReadError
from penstock.cache.base import RequestError
from penstock.cache.stores import open_store
from penstock.readers.origin import LocalFolder

if TYPE_CHECKING:
    from pathlib import Path

FAULTS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT]


def failing(code: int) -> Any:
    def fail(*_args: Any, **_more: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("what", ["walk", "top", "info", "read"])
def test_a_mount_that_fails_is_no_empty_folder(
    what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x").write_bytes(b"hello")
    store = open_store(tmp_path.as_uri(), {})
    found = store.info("inner/x")
    assert found is not None
    version = found.version
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if os.fspath(path).endswith("inner"):
            failing(code)()
        return real(path)

    if what in ("walk", "top"):
        monkeypatch.setattr("os.scandir", scandir)
    elif what == "info":
        monkeypatch.setattr("os.stat", failing(code))
    else:
        monkeypatch.setattr("builtins.open", failing(code))
    ask = {
        "walk": lambda: list(store.walk()),
        "top": lambda: store.list_folder("inner"),
        "info": lambda: store.info("inner/x"),
        "read": lambda: store.read("inner/x", (0, 5), version=version),
    }[what]
    with pytest.raises(RequestError) as caught:
        ask()
    monkeypatch.undo()
    assert caught.value.kind == ("denied" if code == errno.EACCES else "transient")
    assert caught.value.remedy is not None
    assert "credentials" not in caught.value.remedy
    assert [info.path for info in store.walk()] == ["inner/x"]
    assert list(store.walk("nowhere")) == []
    assert store.info("nowhere") is None


@pytest.mark.parametrize("code", FAULTS)
def test_a_file_that_cant_be_looked_at_is_not_missing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.tar").write_bytes(b"hello")
    origin = LocalFolder(os.fsencode(tmp_path), None)
    assert origin.find(b"x.tar") is not None
    assert origin.find(b"nowhere") is None
    assert origin.entry(b"nowhere") is None
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        if os.fsencode(path).endswith(b"x.tar"):
            failing(code)()
        return real(path, **more)

    monkeypatch.setattr("os.stat", stat)
    for ask in (origin.find, origin.entry):
        with pytest.raises(ReadError, match=r"x\.tar: can't be examined"):
            ask(b"x.tar")
