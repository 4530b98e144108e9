"""Listing a folder: names of any bytes, skipped files, links, and files that can't be listed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetNotFoundError, FetchError, MissingDependencyError
from penstock.readers.files import printable, unsafe_reason
from penstock.readers.formats.folder import list_folder
from penstock.readers.origin import LocalFolder, Scratch, locate
from tests.images import write_folder
from tests.properties import examples

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.formats import DatasetFiles
    from penstock.readers.origin import Url


def listing(url: Url, tmp_path: Path) -> DatasetFiles:
    return list_folder(locate(url, storage_options=None, scratch=Scratch(tmp_path / "cache")))


def names(found: DatasetFiles) -> list[bytes]:
    return [file.name for file in found.entries]


def reasons(found: DatasetFiles) -> dict[bytes, str]:
    return {q.name: q.reason for q in found.quarantined}


def test_dotfiles_and_penstocks_own_folders_are_skipped(tmp_path: Path) -> None:
    files = [".DS_Store", "a/.hidden.jpg", ".git/x.jpg", "_penstock/x.jpg", "a/1.jpg"]
    files += ["b.penstock/x.jpg", "a/c.penstock/x.jpg"]
    found = listing(write_folder(tmp_path / "set", dict.fromkeys(files, b"x")), tmp_path)
    assert names(found) == [b"a/1.jpg"]
    assert not found.quarantined


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path / "set")
    os.makedirs(root + b"/cl\xff\nass")
    odd = [b"new\nline.jpg", b"\xff\xfe.jpg", b"..jpg.", b"sp ace'\".jpg"]
    for name in odd:
        with open(root + b"/cl\xff\nass/" + name, "wb") as file:
            file.write(b"x")
    found = listing(root, tmp_path)
    # "..jpg." starts with a dot and is skipped like any dot-file.
    assert names(found) == sorted(b"cl\xff\nass/" + name for name in odd if name[:1] != b".")


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"a/1.jpg": b"x"})
    write_folder(tmp_path / "elsewhere", {"2.jpg": b"y"})
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "gone.jpg").symlink_to(tmp_path / "nowhere")
    found = listing(root, tmp_path)
    assert names(found) == [b"a/1.jpg", b"b/2.jpg"]
    assert "symbolic link" in reasons(found)[b"a/up"]
    assert "symbolic link" in reasons(found)[b"a/gone.jpg"]


def test_an_irregular_file_is_quarantined(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"1.jpg": b"x"})
    os.mkfifo(root / "pipe.jpg")
    assert "regular" in reasons(listing(root, tmp_path))[b"pipe.jpg"]


@pytest.mark.parametrize(
    ("url", "error", "word"),
    [
        ("{tmp}/missing", DatasetNotFoundError, "no such file"),
        ("file://{tmp}/missing", DatasetNotFoundError, "no such file"),
        ("{tmp}/empty", DatasetNotFoundError, "empty"),
        ("{tmp}/file", ConfigError, "folder"),
        ("nonsense://x/y", ConfigError, "nonsense"),
        ("memory://nowhere", DatasetNotFoundError, "memory"),
        ("", ConfigError, "url"),
    ],
)
def test_a_url_that_is_no_folder_raises_an_error_with_a_remedy(
    tmp_path: Path, url: str, error: type[Exception], word: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(error, match=word):
        listing(url.format(tmp=tmp_path), tmp_path)


def test_a_missing_backend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> object:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", fail)
    with pytest.raises(MissingDependencyError, match="s3fs"):
        listing("sftp://host/set", tmp_path)


def test_a_remote_folder_lists_as_a_local_one(tmp_path: Path) -> None:
    files = {"b/2.jpg": b"22", "a/1.jpg": b"1", ".hidden": b"x", "stray.txt": b"x"}
    local = listing(write_folder(tmp_path / "set", files), tmp_path)
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe(f"/lists/{name}", data)
    remote = listing("memory://lists", tmp_path)
    assert names(remote) == names(local)
    assert [f.size_bytes for f in remote.entries] == [f.size_bytes for f in local.entries]
    assert reasons(remote) == reasons(local)


def test_a_remote_name_that_leaves_the_dataset_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    bad = ["/evil/../x.jpg", "/evil//etc/../y.jpg", "/evil/a/\0.jpg", "/evil/./y.jpg"]
    found = {path: {"size": 1, "type": "file"} for path in ["/evil/a/1.jpg", *bad]}
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: found)
    listed = listing("memory://evil", tmp_path)
    assert names(listed) == [b"a/1.jpg"]
    assert len(listed.quarantined) == len(bad)


def test_errors_of_a_store_hide_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AccessDenied(Exception):
        """Some backends' errors aren't OSErrors."""

    def fail(*_: object, **__: object) -> object:
        raise AccessDenied("no access with hush-hush to https://me:pw@host/x?X-Signature=abc")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", fail)
    origin = locate(
        "memory://private/set",
        storage_options={"client": {"secret": "hush-hush"}, "retry_timeout": 0.05},
        scratch=Scratch(tmp_path / "cache"),
    )
    with pytest.raises(FetchError, match="AccessDenied") as caught:
        list_folder(origin)
    assert caught.value.uri == "memory://private/set"
    for secret in ("hush-hush", "pw", "abc"):
        assert secret not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_changed_folder_is_detected_by_its_time(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", {"a/1.jpg": b"x", "b/2.jpg": b"x"})
    origin = LocalFolder(os.fsencode(root))
    before = list_folder(origin)
    assert origin.changed_directories(before.directories) == []
    os.utime(root / "b", ns=(1, 1))
    assert origin.changed_directories(before.directories) == [b"b"]


@examples(200)
@given(name=st.binary(max_size=30))
def test_printable_names_are_one_line_of_valid_text_and_differ(name: bytes) -> None:
    text = printable(name)
    assert text.encode("utf-8").decode() == text
    assert len(text.splitlines()) <= 1
    assert printable(name + b"\\n") != printable(name + b"\n")


@pytest.mark.parametrize("name", [b"a/../b", b"..", b"/a", b"a\0b", b"./a"])
def test_unsafe_names(name: bytes) -> None:
    assert unsafe_reason(name) is not None


@pytest.mark.parametrize("name", [b"a/b.jpg", b"..a", b"a..b/c", b"\xff\n"])
def test_safe_names(name: bytes) -> None:
    assert unsafe_reason(name) is None
