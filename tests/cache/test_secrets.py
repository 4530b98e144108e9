"""Test that credentials are found, never shown, and not part of a store's scope."""

from __future__ import annotations

import logging
import pickle

import pytest

from penstock.cache import (
    ConfigError,
    DatasetNotFoundError,
    FetchError,
    PenstockWarning,
    WorkerError,
    clean_message,
    escape,
    find_secrets,
    redact,
    store_scope,
)
from penstock.readers import Dataset
from penstock.readers.files import printable


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/x", "s3://b/x"),
        ("https://me:pw@host/x?sig=1&y=2", "https://host/x"),
        ("/a/b@c?d", "/a/b@c?d"),
        ("https://me:p w@host/x", "https://host/x"),
        ("https://me:p@w@host/x", "https://host/x"),
        ("https://me:p%40w@host:8000/x", "https://host:8000/x"),
        ("s3://AKIA:ab/cd+ef@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:ab cd/e@f@bucket/x", "s3://bucket/x"),
        ("https://host/x?X-Amz-Signature=ab&token=t", "https://host/x"),
        ("https://host:8000/a@v2/b", "https://host:8000/a@v2/b"),
        ("https://host/a@v2", "https://host/a@v2"),
        ("abfs://box@account/x", "abfs://box@account/x"),
        ("abfs://box:key@account/x", "abfs://account/x"),
        ("simplecache::https://me:pw@host/x", "simplecache::https://host/x"),
        ("not https://me:p@w@host/x, nor ftp://a:b@c", "not https://host/x, nor ftp://c"),
        ("https://host: refused; ask me@home", "https://host: refused; ask me@home"),
        ("https://host/x: is there; ask me@home", "https://host/x: is there; ask me@home"),
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


def test_messages_hold_no_credentials() -> None:
    error = OSError("403 for s3://key:word@b/x?X-Amz-Signature=abc with tok-123")
    shown = clean_message(error, ("tok-123",))
    assert shown.startswith("OSError: 403")
    assert not [secret for secret in ("key:word", "abc", "tok-123") if secret in shown]


HOSTILE = "https://me:p w@host/a\nb\x1b[31m\u202egpj.exe\u2028\x9b\udcff"
SHOWN = "https://host/a\\nb\\x1b[31m\\u202egpj.exe\\u2028\\x9b\\xff"


def test_names_are_escaped_where_they_are_shown() -> None:
    assert escape(redact(HOSTILE)) == SHOWN
    assert printable(b"a\n\x1b\xe2\x80\xae\\\xff") == "a\\n\\x1b\\u202e\\\\\\xff"
    assert escape("Zürich 東京 \U0001f600") == "Zürich 東京 \U0001f600"


@pytest.mark.parametrize("kind", [ConfigError, DatasetNotFoundError, PenstockWarning])
def test_errors_and_warnings_show_neither_credentials_nor_controls(kind: type[Exception]) -> None:
    shown = str(kind(HOSTILE))
    assert "p w" not in shown
    assert not set("\x1b\u202e\u2028\x9b\udcff") & set(shown)
    if kind is not PenstockWarning:
        assert shown == SHOWN
        again = pickle.loads(pickle.dumps(kind(HOSTILE)))
        assert str(again) == SHOWN


def test_errors_keep_what_they_carry() -> None:
    error = FetchError(f"{HOSTILE}: gone", uri="x", missing=True)
    assert (str(error), error.uri, error.missing) == (f"{SHOWN}: gone", "x", True)
    assert str(WorkerError("one\ntwo\x07")) == "one\ntwo\\x07"


def test_log_lines_show_neither_credentials_nor_controls(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("penstock")
    log.warning("%s: %d of %s", HOSTILE, 3, ValueError("a\x1bb"))
    assert caplog.messages == [f"{SHOWN}: 3 of a\\x1bb"]


def test_a_dataset_shows_no_password() -> None:
    dataset = Dataset("https://me:p@w w@host/x?sig=abc")
    assert repr(dataset) == "Dataset('https://host/x')"
    assert dataset.url == "https://host/x"
