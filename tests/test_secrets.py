"""What must not be shown is found and left out, and tells no store from another."""

from __future__ import annotations

import pytest

from cache.secrets import clean_message, find_secrets, redact, store_scope


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


def test_messages_hold_no_credentials() -> None:
    error = OSError("403 for s3://key:word@b/x?X-Amz-Signature=abc with tok-123")
    shown = clean_message(error, ("tok-123",))
    assert shown.startswith("OSError: 403")
    assert not [secret for secret in ("key:word", "abc", "tok-123") if secret in shown]
