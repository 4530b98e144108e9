"""Test storage_options: fsspec's and obstore's names, and errors for others."""

from __future__ import annotations

import base64
import os
import string
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import (
    ConfigError,
    FetchError,
    MissingDependencyError,
    find_secrets,
    hide,
    plain_query,
    redact,
    url_secrets,
)
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import (
    AZURE_OPTIONS,
    GCS_OPTIONS,
    HTTP_OPTIONS,
    S3_OPTIONS,
    FsspecStore,
    HttpStore,
    ObstoreStore,
    failed_request,
    fetch_policy,
    object_version,
    open_store,
    page_links,
    parse_seconds,
    retry_after_s,
)
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "options",
    [
        {"key": "K", "secret": "S", "token": "T", "endpoint_url": "http://e", "anon": False},
        {
            "key": "K",
            "secret": "S",
            "token": "T",
            "anon": False,
            "client_kwargs": {"endpoint_url": "http://e"},
        },
        {
            "aws_access_key_id": "K",
            "aws_secret_access_key": "S",
            "aws_session_token": "T",
            "aws_endpoint": "http://e",
            "aws_skip_signature": False,
        },
        {
            "access_key_id": "K",
            "secret_access_key": "S",
            "session_token": "T",
            "endpoint": "http://e",
            "skip_signature": False,
            "use_listings_cache": True,
            "read_timeout": 3,
        },
    ],
)
def test_s3_options_of_either_library_mean_the_same(options: dict[str, Any]) -> None:
    assert S3_OPTIONS.read(options).config == {
        "access_key_id": "K",
        "secret_access_key": "S",
        "session_token": "T",
        "endpoint": "http://e",
        "skip_signature": False,
    }


def test_options_at_the_top_take_precedence() -> None:
    options = {"endpoint_url": "http://top", "client_kwargs": {"endpoint_url": "http://nested"}}
    assert S3_OPTIONS.read(options).config["endpoint"] == "http://top"


def test_the_rest_of_s3fs() -> None:
    settings = S3_OPTIONS.read(
        {
            "config_kwargs": {
                "s3": {"addressing_style": "virtual"},
                "signature_version": object,
                "proxies": {"https": "http://proxy"},
                "connect_timeout": 3,
                "region_name": "eu-north-1",
            },
            "client_kwargs": {"verify": False, "region_name": None},
            "profile": "work",
            "requester_pays": True,
        }
    )
    assert settings.config == {
        "virtual_hosted_style_request": True,
        "skip_signature": True,
        "request_payer": True,
        "region": "eu-north-1",
        "profile": "work",
    }
    assert settings.client["allow_invalid_certificates"] is True
    assert settings.client["proxy_url"] == "http://proxy"


def test_gcs_tokens(tmp_path: Path) -> None:
    place = os.path.join(tmp_path, "login.json")
    assert GCS_OPTIONS.read({"token": "anon", "project": "p"}).config == {"skip_signature": True}
    assert GCS_OPTIONS.read({"token": None}).config == {}
    assert GCS_OPTIONS.read({"token": "google_default"}).config == {}
    assert GCS_OPTIONS.read({"token": place}).config == {"application_credentials": place}
    assert GCS_OPTIONS.read({"token": "ya29.x"}).config == {"bearer_token": "ya29.x"}
    assert GCS_OPTIONS.read({"token": {"a": 1}}).config == {"service_account_key": '{"a": 1}'}
    assert GCS_OPTIONS.read({"google_service_account": "p"}).config == {"service_account": "p"}
    with pytest.raises(ConfigError, match="gcsfs"):
        GCS_OPTIONS.read({"token": "browser"})


def test_azure_logins() -> None:
    assert AZURE_OPTIONS.read({"account_name": "a", "sas_token": "?sv=1&sig=2"}).config == {
        "account_name": "a",
        "sas_key": "sv=1&sig=2",
    }
    text = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=Zm9v==;EndpointSuffix=x"
    assert AZURE_OPTIONS.read({"connection_string": text}).config == {
        "account_name": "a",
        "account_key": "Zm9v==",
    }
    assert AZURE_OPTIONS.read({"credential": "Zm9v"}).config == {"account_key": "Zm9v"}
    assert AZURE_OPTIONS.read({"credential": "?sig=1"}).config == {"sas_key": "sig=1"}
    assert AZURE_OPTIONS.read({"azure_storage_account_name": "a"}).config == {"account_name": "a"}
    with pytest.raises(ConfigError, match="credential"):
        AZURE_OPTIONS.read({"credential": object()})


def test_http_headers_and_users() -> None:
    settings = HTTP_OPTIONS.read(
        {"headers": {"A": "1"}, "client_kwargs": {"headers": {"B": "2"}, "auth": ("u", "p")}}
    )
    assert settings.client["default_headers"] == {
        "A": "1",
        "B": "2",
        "Authorization": "Basic " + base64.b64encode(b"u:p").decode(),
    }


@pytest.mark.parametrize(
    ("url", "options", "known"),
    [
        ("s3://b/x", {"endpoint_uri": "http://e"}, "endpoint_url"),
        ("s3://b/x", {"client_kwargs": {"endpoint": "http://e", "endpiont": 1}}, "endpoint_url"),
        ("gs://b/x", {"key": "k"}, "token"),
        ("az://b/x", {"acount_name": "k"}, "account_name"),
        ("https://h/x", {"header": {}}, "headers"),
        ("s3://b/x", {"client_options": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_known(
    url: str, options: dict[str, Any], known: str
) -> None:
    with pytest.raises(ConfigError, match=known):
        open_store(url, options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3:///x", {"key": "k", "secret": "s"}),
        ("s3://key:hush123@bucket/x", {"key": "k", "secret": "s"}),
        ("az://container/x", {}),
        ("http://", {}),
        ("http://[::1/x", {}),
        ("nonsense://x/y", {}),
        ("s3://b/x", {"key": "k", "secret": "s", "client_kwargs": 5}),
        ("s3://b/x", {"key": "k", "read_timeout": "hush123"}),
        ("s3://b/x", {"key": "k", "retry_timeout": -1}),
        ("s3://b/x", {"profile": "no-such-profile-here"}),
    ],
)
def test_nonsense_is_a_clear_error(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    assert "hush123" not in str(caught.value)


def test_a_url_of_a_package_that_is_not_there() -> None:
    with pytest.raises((MissingDependencyError, ConfigError, FetchError)):
        open_store("dropbox://x/y", {})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3, 3), (0.5, 0.5), ("20s", 20), ("500 ms", 0.5), ("2min", 120), (timedelta(minutes=1), 60)],
)
def test_seconds(value: Any, wanted: float) -> None:
    assert parse_seconds(value, "read_timeout") == wanted


@pytest.mark.parametrize("value", [0, -1, True, "soon", "", "5 years", float("nan"), [1], 1e12])
def test_seconds_refuses(value: Any) -> None:
    with pytest.raises(ConfigError, match="read_timeout"):
        parse_seconds(value, "read_timeout")


def test_limits_come_from_the_options() -> None:
    policy = fetch_policy({"read_timeout": 5, "connect_timeout": "2s", "retry_timeout": 60})
    assert (policy.read_timeout_s, policy.connect_timeout_s, policy.retry_timeout_s) == (5, 2, 60)
    policy = fetch_policy(
        {
            "client_options": {"read_timeout": "7s"},
            "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=9)},
        }
    )
    assert (policy.read_timeout_s, policy.max_attempts, policy.retry_timeout_s) == (7, 4, 9)
    with pytest.raises(ConfigError, match="max_retries"):
        fetch_policy({"retry_config": {"max_retries": "many"}})


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://b/x", ObstoreStore),
        ("s3a://b/x/", ObstoreStore),
        ("gs://b", ObstoreStore),
        ("gcs://b/x", ObstoreStore),
        ("az://c/x", ObstoreStore),
        ("abfss://c@account.dfs.core.windows.net/x", ObstoreStore),
        ("https://h/x", HttpStore),
        ("http://[::1]:80/x", HttpStore),
        ("simplecache::memory://x", FsspecStore),
        ("memory://x", FsspecStore),
        ("file:///x", FsspecStore),
    ],
)
def test_who_serves_what(url: str, kind: type) -> None:
    options: dict[str, Any] = {}
    if url.startswith("s3"):
        options = {"key": "kkkkk", "secret": "sssss"}
    elif url.startswith(("az", "abfs")):
        options = {"account_name": "account", "account_key": "Zm9vYmFy"}
    elif url.startswith("g"):
        options = {"token": "anon"}
    store = open_store(url, options)
    assert type(store) is kind
    assert store.url == url.rstrip("/")


def test_a_scope_distinguishes_places_only() -> None:
    def scope(url: str, **options: Any) -> str:
        return open_store(url, {"key": "k1", "secret": "s1", **options}).scope

    plain = scope("s3://b/x")
    assert plain == scope("s3://b/x", key="other", secret="other", read_timeout=5)
    assert plain != scope("s3://b/x", endpoint_url="http://minio")
    assert scope("s3://b/x", endpoint_url="http://minio/") == scope(
        "s3://b/x", client_kwargs={"endpoint_url": "http://minio"}
    )
    one = open_store("https://h/x?X-Amz-Signature=1&Expires=5", {})
    assert one.scope == open_store("https://h/x?X-Amz-Signature=2&Expires=7", {}).scope
    assert one.scope != open_store("https://h/x?dataset=2", {}).scope


def test_a_web_server_without_ranges_is_refused_with_the_remedy(tmp_path: Path) -> None:
    from penstock.cache.base import FetchPolicy, ObjectRange
    from tests.servers import Faults

    (tmp_path / "x").write_bytes(b"0123456789")
    with serving(tmp_path, Faults(p=1.0, kinds=("whole",))) as server:
        fetcher = Fetcher(
            open_store(server.url, {}), policy=FetchPolicy(backoff_base_s=0.001, max_attempts=50)
        )
        with pytest.raises(FetchError, match="doesn't support ranges"):
            fetcher.fetch([ObjectRange(path="x", start=0, end=5, version=None)], lambda *_: None)
        fetcher.close()
        assert server.requests <= 5


def test_an_environments_endpoint_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x").write_bytes(b"hello")
    with serving(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kkkkkkkk")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ssssssss")
        assert bytes(open_store("s3://bucket", {}).read("x").data) == b"hello"


def test_a_profile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    login = tmp_path / "login"
    login.write_text("[work]\naws_access_key_id = PROFILEKEY\naws_secret_access_key = ssss\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(login))
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x").write_bytes(b"hello")
    with serving(tmp_path) as server:
        store = open_store("s3://bucket", {"profile": "work", "endpoint_url": server.url})
        assert bytes(store.read("x").data) == b"hello"
        assert "X-Amz-Credential=PROFILEKEY" in server.targets_of["/bucket/x"]


# -- what backends' exceptions mean ----------------------------------------------------------------


class Answered(Exception):
    """An error with the attributes of aiohttp's and botocore's errors."""

    def __init__(self, status: int, *, response: Any = None, headers: Any = None) -> None:
        super().__init__(f"answered {status}")
        self.response = response
        if response is None:
            self.status = status
            self.headers = headers or {}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "denied"),
        (403, "denied"),
        (404, "missing"),
        (412, "changed"),
        (416, "changed"),
        (429, "throttled"),
        (503, "throttled"),
        (500, "transient"),
        (408, "transient"),
        (400, "refused"),
    ],
)
def test_a_status_of_any_backend(status: int, kind: str) -> None:
    headers = {"retry-after": "7"}
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    for error in (
        Answered(status, headers=headers),
        Answered(status, response={"ResponseMetadata": metadata}),
    ):
        outer = OSError("translated")
        outer.__cause__ = error
        for raised in (error, outer):
            failed = failed_request(raised, ())
            assert failed.kind == kind
            assert failed.retry_after_s == (7.0 if kind in ("throttled", "transient") else None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), "missing"),
        (PermissionError("x"), "denied"),
        (TimeoutError("x"), "transient"),
        (ConnectionResetError("x"), "transient"),
        (NotImplementedError("x"), "refused"),
        (TypeError("x"), "refused"),
    ],
)
def test_an_exception_without_a_status(error: Exception, kind: str) -> None:
    assert failed_request(error, ()).kind == kind


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after_s({"Retry-After": "120"}) == 120
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None


def test_a_version_is_an_etag_or_size_and_time() -> None:
    assert object_version({"ETag": '"abc"', "mtime": 5}) == "abc"
    assert object_version({"ETag": 'W/"abc"'}) == "W/abc"
    assert object_version({"size": 3, "mtime": 5}) == "3-5.000000"
    assert object_version({"size": 3}) == ""


# -- index pages and secrets -----------------------------------------------------------------------


def test_links_of_an_index_page() -> None:
    page = """<a href="../">..</a><a href="?C=M;O=A">Date</a><a href="a%20b.bin">a b</a>
    <a href='/set/full.bin'>x</a><a href="/elsewhere/y">y</a><a href="http://other/z">z</a>
    <a href="deep/">deep</a><a href="deep/er/x">x</a><a href="a%20b.bin">again</a><a>none</a>
    <a href="./dot.bin">d</a><a href="/set/">self</a><a href="%2e%2e/up">up</a>"""
    assert page_links(page, "/set") == (["a b.bin", "full.bin", "dot.bin"], ["deep"])
    assert page_links('<a href="/x">x</a><a href="y/">y</a>', "") == (["x"], ["y"])


@given(st.text(string.ascii_letters + string.digits, min_size=4, max_size=30))
def test_credentials_of_urls_are_found_and_hidden(secret: str) -> None:
    text = f"error at s3://user:{secret}@host/a?X-Sig={secret}&b=1 and {secret} elsewhere"
    secrets = url_secrets(f"s3://user:{secret}@host/a?X-Sig={secret}&b=1")
    assert secret in secrets
    assert secret not in hide(text, secrets).replace("error at s3://host/a and … elsewhere", "")
    assert f"{secret}@" not in redact(text)
    options = {"client_kwargs": {"auth": ["u", secret]}, "headers": {"Authorization": secret}}
    assert secret in find_secrets(options)


def test_abfs_urls_keep_their_container() -> None:
    assert redact("abfs://c@account/x?sig=1") == "abfs://c@account/x"
    assert redact("abfss://c@account/x") == "abfss://c@account/x"
    assert redact("https://user@host/x") == "https://host/x"
    assert plain_query("https://h/x?sv=1&sig=2&se=3&table=t&token=5") == [("table", "t")]
