"""Parse a URL: a local path or a store's, shown without its credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.readers.origin import local_path, options_scope, show


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("photos", b"photos"),
        (b"pho\xff", b"pho\xff"),
        (Path("/data/photos"), b"/data/photos"),
        ("file:///data/photos", b"/data/photos"),
        ("local:///data", b"/data"),
        ("a::b", b"a::b"),
        ("s3://bucket/photos", None),
        ("https://host/photos", None),
        ("simplecache::s3://bucket/photos", None),
        ("zip://photos::file:///data/set.zip", None),
    ],
)
def test_paths_are_distinguished_from_urls(url: object, path: bytes | None) -> None:
    assert local_path(url) == path  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("s3://bucket/a", "s3://other/b", True),
        ("S3://bucket/a", "s3://bucket/a", True),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("https://host/a", "https://host/b?c=d", True),
        ("https://me:word@host/a", "https://host/b", True),
        ("https://host/a", "https://other/a", False),
        ("https://host/a", "http://host/a", False),
    ],
)
def test_options_are_for_one_store(first: str, second: str, is_same: bool) -> None:
    assert (options_scope(first) == options_scope(second)) is is_same


def test_credentials_are_not_shown() -> None:
    assert show("https://me:word@host/set?sig=abc") == "https://host/set"
    assert show(b"/data/photos") == "/data/photos"
