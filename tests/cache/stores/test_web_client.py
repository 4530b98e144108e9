"""Test answers that are too long, compressed, cut or untrusted: bounded, and reported at once."""

from __future__ import annotations

import gzip
import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ConfigError, FetchError
from penstock.cache.base import FetchPolicy, ObjectRange, RequestError, Store
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import (
    ConnectionPool,
    HttpStore,
    Proxies,
    StoreAddress,
    Timeouts,
    WebClient,
    open_store,
)
from tests.servers.certificates import Authority, authority, server_context
from tests.servers.scripted import Asked, ScriptedServer, Talk, scripted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = bytes(range(256)) * 4000
FOUND = {"ETag": '"v1"'}
LOGIN = {"key": "k" * 20, "secret": "s" * 40}
SLACK = 16 * 2**20
"""What sockets' buffers of both sides may hold of an answer that nobody reads on."""


def store_of(server: ScriptedServer, scheme: str, **more: Any) -> Store:
    """The store of a server. scheme: "s3", or "anon" for an s3 one without a login, or "http"."""
    if scheme == "http":
        return open_store(f"{server.url}/bucket", more)
    login: dict[str, Any] = {"anon": True} if scheme == "anon" else LOGIN
    return open_store("s3://bucket", {"endpoint_url": server.url, **login, **more})


def one_error(server: ScriptedServer, act: Callable[[Fetcher], object], scheme: str) -> FetchError:
    """Return the error of a whole job with its retries."""
    fetcher = Fetcher(store_of(server, scheme))
    with pytest.raises(FetchError) as caught:
        act(fetcher)
    fetcher.close()
    return caught.value


def range_of(fetcher: Fetcher) -> None:
    fetcher.fetch([ObjectRange(path="x", start=0, end=5000, version="v1")], lambda *_: None)


# -- bounds ----------------------------------------------------------------------------------------


RIGHT = {"Content-Range": f"bytes 0-4999/{len(DATA)}", **FOUND}


@pytest.mark.parametrize("scheme", ["http", "s3", "anon"])
@pytest.mark.parametrize("more", [{}, {"Transfer-Encoding": "chunked"}])
def test_an_endless_body_behind_a_right_head_ends_at_once(
    scheme: str, more: dict[str, str]
) -> None:
    def act(talk: Talk, _: Asked) -> None:
        if not more:
            return talk.endless(206, RIGHT)
        talk.head(206, {**RIGHT, **more})
        while not talk.closing.is_set() and talk.write(b"10000\r\n" + bytes(65536) + b"\r\n"):
            pass
        return None

    with scripted(act) as server:
        error = one_error(server, range_of, scheme)
        assert "fault of the server" in str(error)
        assert "more than the 5000 requested bytes" in str(error)
        assert len(server.asked) == 1
        assert server.sent_bytes < SLACK


@pytest.mark.parametrize("scheme", ["http", "s3", "anon"])
def test_a_length_beyond_the_range_is_not_read_at_all(scheme: str) -> None:
    def act(talk: Talk, _: Asked) -> None:
        talk.endless(206, {**RIGHT, "Content-Length": str(10**12)})

    with scripted(act) as server:
        error = one_error(server, range_of, scheme)
        assert "1000000000000 bytes" in str(error)
        assert len(server.asked) == 1
        assert server.sent_bytes < SLACK


@pytest.mark.parametrize("scheme", ["http", "s3", "anon"])
@pytest.mark.parametrize("length", [{}, {"Content-Length": str(10**12)}])
def test_a_whole_object_is_no_longer_than_announced(scheme: str, length: dict[str, str]) -> None:
    with scripted(lambda t, _: t.endless(200, {**FOUND, **length})) as server:
        error = one_error(server, lambda f: f.fetch_object("x", size_bytes=5000), scheme)
        assert "5000" in str(error)
        assert len(server.asked) == 1
        assert server.sent_bytes < SLACK


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("status", [404, 403, 400, 301, 302])
def test_a_refusal_is_no_reason_to_read_for_ever(scheme: str, status: int) -> None:
    with scripted(lambda t, _: t.endless(status, {"Location": "/y"})) as server:
        one_error(server, range_of, scheme)
        assert len(server.asked) <= 12
        assert server.sent_bytes < SLACK * len(server.asked)


@pytest.mark.parametrize("status", [401, 403])
def test_a_web_server_that_wants_a_login_is_no_bucket(status: int) -> None:
    with scripted(lambda t, _: t.answer(status, b"no")) as server:
        text = str(one_error(server, range_of, "http"))
        assert server.url in text
        assert "the login in storage_options" in text
        assert "region" not in text
        assert "public bucket" not in text


def test_the_head_of_an_answer_has_an_end() -> None:
    def act(talk: Talk, _: Asked) -> None:
        talk.head(206, {f"X-{n}": "y" * 1000 for n in range(100)})
        talk.closing.wait(30)

    with scripted(act) as server:
        assert "head" in str(one_error(server, range_of, "http"))
        assert len(server.asked) == 1


def test_an_endless_index_page_is_refused() -> None:
    timeouts = Timeouts(connect_s=30.0, read_s=30.0, whole_s=30.0)
    client = WebClient(
        ConnectionPool(timeouts=timeouts, proxies=Proxies(), tls=ssl.create_default_context)
    )
    with scripted(lambda t, _: t.endless(200, {})) as server:
        address = StoreAddress(url=server.url, options={}, policy=FetchPolicy(), secrets=())
        objects = HttpStore(address, client, headers={}, scope="")
        with pytest.raises(RequestError, match="a fault of the server"):
            objects.page(server.url, most_bytes=2**20)
        assert len(server.asked) == 1
        assert server.sent_bytes < SLACK
    client.abort()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_answer_in_chunks_is_an_answer(scheme: str) -> None:
    def act(talk: Talk, asked: Asked) -> None:
        span = asked.span() or (0, len(DATA))
        part = DATA[slice(*span)]
        report = f"bytes {span[0]}-{span[1] - 1}/{len(DATA)}"
        status = 206 if asked.span() else 200
        talk.head(status, {**FOUND, "Transfer-Encoding": "chunked", "Content-Range": report})
        for at in range(0, len(part), 70_000):
            some = part[at : at + 70_000]
            talk.write(b"%x\r\n%s\r\n" % (len(some), some))
        talk.write(b"0\r\n\r\n")

    with scripted(act) as server:
        store = store_of(server, scheme)
        assert bytes(store.read("x", (7, 500_000)).data) == DATA[7:500_000]
        assert bytes(store.read("x").data) == DATA
        store.close()


def test_connections_are_kept() -> None:
    ports: set[str] = set()

    def act(talk: Talk, asked: Asked) -> None:
        ports.add(str(talk._handler.client_address))
        if asked.path.endswith("nowhere"):
            talk.answer(404, b"no")
        else:
            talk.serve(DATA, asked)

    with scripted(act) as server:
        store = store_of(server, "http")
        for at in range(50):
            assert bytes(store.read("x", (at, at + 9)).data) == DATA[at : at + 9]
            assert store.info("nowhere") is None
            with pytest.raises(RequestError):
                store.read("nowhere", (0, 5))
        store.close()
        assert len(ports) == 1


def test_abort_ends_requests_that_hang_in_any_phase() -> None:
    """Requests hang before the head, in the body, or in a slow body; none starts after
    the abort."""
    waiting = threading.Semaphore(0)

    def act(talk: Talk, asked: Asked) -> None:
        if asked.path.endswith("body"):
            talk.head(206, {**RIGHT, "Content-Length": "5000"})
            talk.write(b"some")
        waiting.release()
        while asked.path.endswith("drip") and not talk.closing.wait(0.05) and talk.write(b"."):
            pass
        talk.closing.wait(60)

    with scripted(act) as server:
        store = store_of(server, "http", read_timeout=600, retry_timeout=600)
        raised: list[str] = []

        def ask(path: str) -> None:
            try:
                store.read(path, (0, 5000), version="v1")
            except RequestError as error:
                raised.append(str(error))

        threads = [threading.Thread(target=ask, args=(p,)) for p in ("head", "body", "drip")]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert waiting.acquire(timeout=60)
        store.close()
        for thread in threads:
            thread.join(60)
        assert raised == ["closed"] * 3
        with pytest.raises(RequestError, match="closed"):
            store.read("x", (0, 5))


@pytest.mark.parametrize("served", [False, True])
def test_a_server_that_never_answered_a_range_is_given_up(served: bool) -> None:
    """One that did may send a whole object now and then."""
    ranges = served

    def act(talk: Talk, asked: Asked) -> None:
        if ranges:
            talk.serve(DATA, asked)
        else:
            talk.answer(200, DATA)

    with scripted(act) as server:
        store = store_of(server, "http")
        if served:
            store.read("x", (1, 5))
        ranges = False
        kinds = []
        for _ in range(5):
            with pytest.raises(RequestError, match="the whole object") as caught:
                store.read("x", (1, 5))
            kinds.append(caught.value.kind)
        store.close()
    assert kinds == (5 * ["transient"] if served else 3 * ["transient"] + 2 * ["refused"])


# -- what is named at once -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("coding", ["gzip", "br", "x-own"])
def test_a_server_that_packs_ranges_is_named_at_once(scheme: str, status: int, coding: str) -> None:
    def act(talk: Talk, asked: Asked) -> None:
        start, end = asked.span() or (0, len(DATA))
        packed = gzip.compress(DATA[start:end] if status == 206 else DATA)
        more = {**FOUND, "Content-Encoding": coding}
        if status == 206:
            more["Content-Range"] = f"bytes {start}-{end - 1}/{len(DATA)}"
        talk.answer(status, packed, more)

    with scripted(act) as server:
        error = one_error(server, range_of, scheme)
        assert f"Content-Encoding: {coding}" in str(error)
        assert "Disable compression" in str(error)
        assert len(server.asked) == 1
        assert server.asked[0].headers["accept-encoding"] == "identity"


def test_a_server_that_packs_all_is_named_when_it_is_asked_for_the_size() -> None:
    with scripted(
        lambda t, _: t.answer(200, gzip.compress(DATA), {"Content-Encoding": "gzip"})
    ) as server:
        assert "Content-Encoding" in str(one_error(server, lambda f: f.info("x"), "http"))
        assert "Content-Encoding" in str(one_error(server, lambda f: f.fetch_object("x"), "http"))
        assert "Content-Encoding" in str(one_error(server, lambda f: list(f.walk()), "http"))


@pytest.mark.parametrize(("status", "text"), [(400, "region="), (301, "region="), (403, "path")])
def test_a_bucket_without_facts_leaves_little_to_check(status: int, text: str) -> None:
    """A HEAD is answered without a text."""
    with scripted(lambda t, _: t.answer(status)) as server:
        assert text in str(one_error(server, lambda f: f.info("x"), "s3"))


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("NoSuchBucket", 404, "no bucket 'bucket'"),
        ("AccessDenied", 403, "lack permission"),
        ("InvalidAccessKeyId", 403, "doesn't know this access key"),
        ("SignatureDoesNotMatch", 403, "secret="),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("ExpiredToken", 400, "log in again"),
        ("AuthorizationHeaderMalformed", 400, "region='eu-x-1'"),
        ("PermanentRedirect", 301, "region='eu-x-1'"),
    ],
)
@pytest.mark.parametrize("what", ["range", "whole", "walk", "top"])
def test_a_buckets_error_is_reported_in_words(code: str, status: int, text: str, what: str) -> None:
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no\x1b[31m</Message>"
        "<Region>eu-x-1</Region></Error>"
        if status in (400, 301) and code != "ExpiredToken"
        else f"<Error><Code>{code}</Code><Message>no\x1b[31m</Message></Error>"
    )
    acts: dict[str, Callable[[Fetcher], object]] = {
        "range": range_of,
        "whole": lambda fetcher: fetcher.fetch_object("x"),
        "walk": lambda fetcher: list(fetcher.walk()),
        "top": lambda fetcher: fetcher.list_folder(),
    }
    with scripted(lambda t, _: t.answer(status, body.encode())) as server:
        if status == 301 and what in ("walk", "top"):
            text = "region="  # obstore doesn't report it
        error = str(one_error(server, acts[what], "s3"))
        assert text in error
        assert "<" not in error
        assert "\x1b" not in error
        assert "index` again" not in error
        assert len(server.asked) <= 2


def test_a_closed_port_is_reported_within_seconds() -> None:
    """In requests and their times, not by the clock: the limit is the policy's."""
    with scripted(lambda t, a: t.serve(DATA, a)) as server:
        pass
    for scheme in ("http", "s3"):
        for act in (
            range_of,
            lambda f: f.info("x"),
            lambda f: list(f.walk()),
            lambda f: f.list_folder(),
        ):
            policy = FetchPolicy(first_contact_s=0.3)
            fetcher = Fetcher(store_of(server, scheme), policy=policy)
            with pytest.raises(FetchError, match=r"unreachable.*[Rr]efused") as caught:
                act(fetcher)
            fetcher.close()
            assert "Check the host and the port" in str(caught.value)
            assert fetcher.meter.snapshot().requests <= policy.max_attempts
    assert FetchPolicy().first_contact_s <= 8


def test_a_server_that_went_for_a_moment_is_waited_for() -> None:
    """After a first answer the whole retry_timeout holds."""
    answers = iter([None] + [RequestError("unreachable", "Connection refused")] * 6 + [None] * 9)

    class Restarting:
        url, scope, secrets = "test://store", "", ()

        def info(self, _: str) -> None:
            if (error := next(answers)) is not None:
                raise error

        def close(self) -> None: ...

    policy = FetchPolicy(first_contact_s=1e-9, backoff_base_s=0.001)
    fetcher = Fetcher(Restarting(), policy=policy)  # type: ignore[arg-type]
    assert fetcher.info("x") is None
    assert fetcher.info("x") is None
    assert fetcher.meter.snapshot().retries == 6
    fetcher.close()


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9000", "minio:9000", "minio", "http:/x", "//x", ""]
)
@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://container/x"])
def test_an_endpoint_without_a_scheme_is_refused(url: str, endpoint: str) -> None:
    login: dict[str, Any] = dict(LOGIN)
    if url.startswith("gs"):
        login = {"token": "anon"}
    elif url.startswith("az"):
        login = {"account_name": "a", "account_key": "Zm9v"}
    with pytest.raises(ConfigError, match=r"endpoint_url.*scheme"):
        open_store(url, {"endpoint_url": endpoint, **login})


def test_an_environments_endpoint_without_a_scheme_is_no_panic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", "127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "kkkkkkkk"),
        ("AWS_SECRET_ACCESS_KEY", "ssssssss"),
    ):
        monkeypatch.setenv(name, value)
    for ask in (
        lambda store: store.read("x", (0, 5)),
        lambda store: store.info("x"),
        lambda store: store.list_folder(),
        lambda store: list(store.walk()),
    ):
        with pytest.raises((RequestError, ConfigError)):
            ask(open_store("s3://bucket", {}))


# -- certificates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    pytest.importorskip("cryptography")
    return authority(tmp_path_factory.mktemp("ca"))


def of_kind(kind: str, folder: Path, trusted: Authority) -> ssl.SSLContext:
    if kind == "self-signed":
        return server_context(folder, None)
    if kind == "another authority":
        return server_context(folder, authority(folder, "other"))
    if kind == "expired":
        return server_context(folder, trusted, expired=True)
    if kind == "another host":
        return server_context(folder, trusted, host="elsewhere.example")
    return server_context(folder, trusted)


ASKS: dict[str, Callable[[Fetcher], object]] = {
    "range": range_of,
    "info": lambda fetcher: fetcher.info("x"),
    "walk": lambda fetcher: list(fetcher.walk()),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("kind", ["self-signed", "another authority", "expired", "another host"])
def test_a_certificate_is_named_at_the_first_request(
    kind: str, scheme: str, ask: str, tmp_path: Path, trusted: Authority
) -> None:
    with scripted(lambda t, a: t.serve(DATA, a), tls=of_kind(kind, tmp_path, trusted)) as server:
        fetcher = Fetcher(store_of(server, scheme, root_certificate=trusted.path))
        with pytest.raises(FetchError, match="certificate isn't accepted") as caught:
            ASKS[ask](fetcher)
        fetcher.close()
        assert fetcher.meter.snapshot().requests == 1
        assert "root_certificate=" in str(caught.value)
        assert server.asked == []
        if kind == "expired":
            assert "expired" in str(caught.value)


def listing(talk: Talk, asked: Asked) -> None:
    if "list-type" in asked.target:
        talk.answer(
            200,
            b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false'
            b"</IsTruncated><Contents><Key>x</Key><LastModified>2026-01-01T00:00:00.000Z"
            b'</LastModified><ETag>"v1"</ETag><Size>5</Size></Contents></ListBucketResult>',
        )
    elif asked.path.endswith("/"):
        talk.answer(200, b'<a href="x">x</a>')
    else:
        talk.serve(DATA, asked)


@pytest.mark.parametrize("how", ["root_certificate", "verify", "text", "client_options", "folder"])
@pytest.mark.parametrize("scheme", ["http", "s3", "anon"])
def test_an_authority_of_ones_own_is_given_alike_everywhere(
    scheme: str, how: str, tmp_path: Path, trusted: Authority
) -> None:
    with open(trusted.path) as file:
        text = file.read()
    folder = tmp_path / "authorities"
    folder.mkdir()
    (folder / "mine.crt").write_text(text)
    (folder / "README").write_text("no certificate")
    ways: dict[str, dict[str, Any]] = {
        "root_certificate": {"root_certificate": trusted.path},
        "verify": {"verify": trusted.path},
        "text": {"root_certificate": text},
        "client_options": {"client_options": {"root_certificate": trusted.path}},
        "folder": {"verify": str(folder)},
    }
    with scripted(listing, tls=server_context(tmp_path, trusted)) as server:
        store = store_of(server, scheme, **ways[how])
        assert [info.path for info in store.walk()] == ["x"]
        assert bytes(store.read("x", (0, 500)).data) == DATA[:500]
        assert bytes(store.read("x").data) == DATA
        store.close()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_verify_false_trusts_every_certificate_and_true_only_known_ones(
    scheme: str, tmp_path: Path, trusted: Authority
) -> None:
    with scripted(listing, tls=of_kind("self-signed", tmp_path, trusted)) as server:
        store = store_of(server, scheme, verify=False)
        assert [info.path for info in store.walk()] == ["x"]
        assert bytes(store.read("x", (0, 5)).data) == DATA[:5]
        store.close()
        store = store_of(server, scheme, verify=True)
        with pytest.raises(RequestError, match="certificate"):
            store.read("x", (0, 5))
        store.close()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_port_without_tls_is_named(scheme: str) -> None:
    with scripted(listing) as server:
        server.url = server.url.replace("http://", "https://")
        error = one_error(server, range_of, scheme)
        assert "doesn't speak TLS" in str(error)


@pytest.mark.parametrize("name", ["root_certificate", "verify"])
@pytest.mark.parametrize("url", ["https://h/x", "s3://b/x", "gs://b/x"])
def test_a_file_that_is_no_certificate_is_reported(url: str, name: str, tmp_path: Path) -> None:
    odd = tmp_path / "odd.crt"
    odd.write_bytes(b"\x30\x82 a DER file")
    login: dict[str, Any] = dict(LOGIN) if url.startswith("s3") else {}
    login = {"token": "anon"} if url.startswith("gs") else login
    for value, reason in (
        (str(odd), "PEM"),
        (str(tmp_path / "nowhere.crt"), "can't be read"),
        (5, "int"),
        (str(tmp_path), "PEM"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}.*{reason}"):
            open_store(url, {name: value, **login})
