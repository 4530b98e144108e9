"""Local copies: whole or not there, one download each, nothing secret in a name or a message."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import fsspec
import pytest

from cache.errors import FetchError
from cache.local_copy import LocalCopies, RemoteObject, find_secrets, redact, store_scope
from cache.threads import ordered

if TYPE_CHECKING:
    from pathlib import Path


class Store:
    """A file system that counts downloads and can be told to misbehave."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.downloads = 0
        self.error: BaseException | None = None
        self.cut = 0
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def get_file(self, path: str, local: str) -> None:
        self.downloads += 1
        self.started.set()
        assert self.go_on.wait(30)
        data = self.objects[path]
        with open(local, "wb") as file:
            file.write(data[: len(data) - self.cut])
            if self.error is not None:
                raise self.error


def wanted(path: str = "b/x", size: int | None = 5, version: str = "v1") -> RemoteObject:
    return RemoteObject(uri=f"s3://{path}", path=path, size_bytes=size, version=version)


def files_below(root: Path) -> list[str]:
    return sorted(name for _, _, names in os.walk(root) for name in names)


def test_a_copy_is_fetched_once_and_private(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    copies = LocalCopies(str(tmp_path / "cache"), store)
    path = copies.fetch(wanted())
    assert copies.fetch(wanted()) == path
    assert store.downloads == 1
    assert copies.bytes_fetched == 5
    with open(path, "rb") as file:
        assert file.read() == b"hello"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "cache").st_mode) == 0o700


def test_equal_base_names_versions_and_stores_are_told_apart(tmp_path: Path) -> None:
    copies = LocalCopies(str(tmp_path), Store({}))
    other = LocalCopies(str(tmp_path), Store({}), scope="another endpoint")
    paths = {
        copies.path(wanted("one/train-000")),
        copies.path(wanted("two/train-000")),
        copies.path(wanted("two/train-000", version="v2")),
        other.path(wanted("two/train-000")),
    }
    assert len(paths) == 4
    assert not any("train" in path for path in paths)


def test_a_name_never_becomes_a_path(tmp_path: Path) -> None:
    store = Store({"../../evil": b"hello"})
    path = LocalCopies(str(tmp_path), store).fetch(wanted("../../evil"))
    assert os.path.commonpath((path, tmp_path)) == str(tmp_path)


def test_many_threads_make_one_download(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    store.go_on.clear()
    copies = LocalCopies(str(tmp_path), store)

    def fetch(number: int) -> str:
        if number == 7:  # all others have begun or wait behind the lock
            store.started.wait(30)
            store.go_on.set()
        return copies.fetch(wanted())

    paths = set(ordered(fetch, range(8), workers=8, ahead=8))
    assert len(paths) == 1
    assert store.downloads == 1
    assert len(files_below(tmp_path)) == 1


def test_the_lock_is_held_while_downloading(tmp_path: Path) -> None:
    """A second process would wait: the part file is locked, and unlocked when its owner dies."""
    import fcntl

    store = Store({"b/x": b"hello"})
    copies = LocalCopies(str(tmp_path), store)
    part = copies.path(wanted()) + ".part"
    busy: list[bool] = []
    download = store.get_file

    def get_file(path: str, local: str) -> None:
        with open(part, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        busy.append(True)
        download(path, local)

    store.get_file = get_file  # type: ignore[method-assign]
    copies.fetch(wanted())
    assert busy == [True]


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    copies = LocalCopies(str(tmp_path), store)
    part = copies.path(wanted()) + ".part"
    os.makedirs(os.path.dirname(part))
    with open(part, "wb") as file:
        file.write(b"half of something longer")
    with open(copies.fetch(wanted()), "rb") as file:
        assert file.read() == b"hello"
    assert not os.path.exists(part)


def test_a_short_transfer_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    store.cut = 2
    copies = LocalCopies(str(tmp_path), store)
    with pytest.raises(FetchError, match="got 3 bytes, wanted 5") as caught:
        copies.fetch(wanted())
    assert caught.value.uri == "s3://b/x"
    assert files_below(tmp_path) == []
    store.cut = 0
    assert os.path.exists(copies.fetch(wanted()))


@pytest.mark.parametrize("error", [OSError("down"), RuntimeError("a backend's own kind")])
def test_a_failed_transfer_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    store = Store({"b/x": b"hello"})
    store.error = error
    copies = LocalCopies(str(tmp_path), store)
    with pytest.raises(FetchError, match=str(error)):
        copies.fetch(wanted())
    assert files_below(tmp_path) == []


def test_an_interrupted_transfer_leaves_nothing(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    store.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        LocalCopies(str(tmp_path), store).fetch(wanted())
    assert files_below(tmp_path) == []


def test_messages_hold_no_credentials(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    store.error = OSError("403 for s3://key:word@b/x?X-Amz-Signature=abc with tok-123")
    copies = LocalCopies(str(tmp_path), store, secrets=("tok-123",))
    with pytest.raises(FetchError) as caught:
        copies.fetch(wanted())
    for secret in ("key:word", "abc", "tok-123"):
        assert secret not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_dropped_copy_is_fetched_again(tmp_path: Path) -> None:
    store = Store({"b/x": b"hello"})
    copies = LocalCopies(str(tmp_path), store)
    copies.fetch(wanted())
    copies.drop(wanted())
    copies.drop(wanted())
    copies.fetch(wanted())
    assert store.downloads == 2


def test_it_works_with_fsspec(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/copies/x", b"hello")
    found = LocalCopies(str(tmp_path), memory).fetch(wanted("/copies/x", size=None))
    with open(found, "rb") as file:
        assert file.read() == b"hello"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/x", "s3://b/x"),
        ("https://me:pw@host/x?sig=1&y=2", "https://host/x"),
        ("/a/b@c?d", "/a/b@c?d"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_secrets_are_found_at_any_depth_and_leave_the_scope_alone() -> None:
    options = {"key": "AKIA", "client_kwargs": {"endpoint_url": "http://e", "token": "t0"}}
    assert set(find_secrets(options)) == {"AKIA", "t0"}
    rotated = {"key": "OTHER", "client_kwargs": {"endpoint_url": "http://e", "token": "t1"}}
    assert store_scope(options) == store_scope(rotated)
    assert store_scope(options) != store_scope({"client_kwargs": {"endpoint_url": "http://f"}})
