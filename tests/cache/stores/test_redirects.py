"""Test redirects: they carry no credentials, and never lead from public to private addresses."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.base import FetchPolicy, ObjectRange, RequestError
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import (
    ConnectionPool,
    Hop,
    HttpStore,
    Proxies,
    StoreAddress,
    Timeouts,
    WebClient,
    WebRequest,
    is_public,
    open_store,
    origin_of,
    redirect_target,
    target_of,
)
from tests.servers.scripted import Asked, Talk, scripted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.base import Store

DATA = bytes(range(256)) * 40
SECRET = "hush-12345"
HEADERS = {"Authorization": f"Bearer {SECRET}", "Cookie": f"session={SECRET}", "X-Api-Key": SECRET}
PAGE = b'<a href="a.bin">a</a>'


def of_a_cdn(talk: Talk, asked: Asked) -> None:
    if asked.path.endswith("/"):
        talk.answer(200, PAGE)
    else:
        talk.serve(DATA, asked)


def use(store: Store, what: str) -> None:
    """Ask for something; what comes must be right."""
    if what == "info":
        found = store.info("set/a.bin")
        assert found is not None
        assert found.size_bytes == len(DATA)
    elif what == "range":
        assert bytes(store.read("set/a.bin", (5, 500)).data) == DATA[5:500]
    elif what == "versioned":
        assert bytes(store.read("set/a.bin", (5, 500), version="v1").data) == DATA[5:500]
    elif what == "whole":
        assert bytes(store.read("set/a.bin").data) == DATA
    else:
        assert [info.path for info in store.walk("set")] == ["set/a.bin"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("what", ["info", "range", "versioned", "whole", "walk"])
def test_another_origin_sees_no_login(what: str, status: int) -> None:
    with scripted(of_a_cdn) as cdn:
        with scripted(lambda t, a: t.redirect(f"{cdn.url}{a.path}?sig=1", status)) as hub:
            store = open_store(hub.url, {"headers": HEADERS})
            use(store, what)
            use(store, what)
            store.close()
            assert hub.seen("x-api-key") == [SECRET] * len(hub.asked)
            assert len(hub.seen("authorization")) == len(hub.asked) > 0
        assert cdn.asked
        assert SECRET not in str([asked.headers for asked in cdn.asked])


@pytest.mark.parametrize("what", ["info", "range", "whole", "walk"])
def test_fsspecs_http_gives_nothing_away_either(what: str) -> None:
    pytest.importorskip("aiohttp")
    import fsspec

    with scripted(of_a_cdn) as cdn, scripted(lambda t, a: t.redirect(cdn.url + a.path)) as hub:
        fs = fsspec.filesystem("http", skip_instance_cache=True, headers=HEADERS)
        store = open_store(hub.url, {}, filesystem=fs)
        use(store, what)
        store.close()
        assert hub.seen("x-api-key") == [SECRET] * len(hub.asked)
        assert cdn.asked
        assert SECRET not in str([asked.headers for asked in cdn.asked])


@pytest.mark.parametrize("throttle", [429, 503])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_what_follows_a_throttled_request_carries_no_login_either(
    scheme: str, throttle: int
) -> None:
    with scripted(of_a_cdn) as cdn:
        throttled: set[str] = set()

        def act(talk: Talk, asked: Asked) -> None:
            if asked.headers.get("range", "") not in throttled:
                throttled.add(asked.headers.get("range", ""))
                talk.answer(throttle, b"", {"Retry-After": "0"})
            else:
                talk.redirect(f"{cdn.url}/set/a.bin")

        with scripted(act) as hub:
            url = hub.url
            options: dict[str, Any] = {"headers": HEADERS}
            if scheme == "s3":
                url = "s3://bucket"
                options = {
                    "key": "k" * 20,
                    "secret": "s" * 40,
                    "token": SECRET,
                    "endpoint_url": hub.url,
                    "client_options": {"default_headers": HEADERS},
                }
            fetcher = Fetcher(open_store(url, options), policy=FetchPolicy(backoff_base_s=0.001))
            spans = [
                ObjectRange(path="set/a.bin", start=at, end=at + 100, version="v1")
                for at in range(0, 5000, 100)
            ]
            found: dict[int, bytes] = {}
            fetcher.fetch(spans, lambda n, answer: found.__setitem__(n, bytes(answer.data)))
            fetcher.close()
        assert b"".join(found[n] for n in range(len(spans))) == DATA[:5000]
        assert len(cdn.asked) >= len(spans)
        for asked in cdn.asked:
            assert SECRET not in str((asked.headers, asked.target))
            assert not {name for name in asked.headers if name.startswith("x-amz")}


@pytest.mark.parametrize("what", ["info", "range", "whole"])
@pytest.mark.parametrize("anon", [True, False])
def test_a_bucket_that_redirects_gives_nothing_away(what: str, anon: bool) -> None:
    with scripted(of_a_cdn) as other:
        with scripted(lambda t, a: t.redirect(f"{other.url}{a.path}")) as endpoint:
            login = {"anon": True} if anon else {"key": "k" * 9, "secret": "s" * 9, "token": SECRET}
            store = open_store("s3://bucket", {"endpoint_url": endpoint.url, **login})
            use(store, what)
            store.close()
            assert ("X-Amz-Signature" in str(endpoint.asked)) is not anon
        assert other.asked
        for asked in other.asked:
            assert SECRET not in str(asked)
            assert not {"authorization", "cookie"} & set(asked.headers)
            assert not {name for name in asked.headers if name.startswith("x-amz")}


def test_the_same_origin_keeps_the_login_and_another_never_gets_it_back() -> None:
    """From hub to hub/2, cdn and hub/3: what came back from elsewhere is elsewhere's word."""

    def act(talk: Talk, asked: Asked) -> None:
        if asked.path == "/a.bin":
            talk.redirect("/2/a.bin")
        elif asked.path == "/2/a.bin":
            talk.redirect(f"{cdn.url}/a.bin")
        else:
            talk.serve(DATA, asked)

    with scripted(act) as hub, scripted(lambda t, _: t.redirect(f"{hub.url}/3/a.bin")) as cdn:
        store = open_store(hub.url, {"headers": HEADERS})
        assert bytes(store.read("a.bin", (0, 10)).data) == DATA[:10]
        store.close()
        with_login = [asked.path for asked in hub.asked if "x-api-key" in asked.headers]
        assert with_login == ["/a.bin", "/2/a.bin"]
        assert [asked.path for asked in hub.asked][-1] == "/3/a.bin"


def test_a_redirect_is_remembered_until_it_expires() -> None:
    """A hub is asked once for many ranges, and again when its signed URL isn't honoured."""
    expired: set[str] = set()
    signed: list[str] = []

    def at_the_hub(talk: Talk, _: Asked) -> None:
        signed.append(f"s{len(signed)}")
        talk.redirect(f"{cdn.url}/blob?sig={signed[-1]}")

    def at_the_cdn(talk: Talk, asked: Asked) -> None:
        if asked.target.partition("sig=")[2] in expired:
            talk.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        else:
            talk.serve(DATA, asked)

    with scripted(at_the_cdn) as cdn, scripted(at_the_hub) as hub:
        store = open_store(hub.url, {"headers": HEADERS})
        for at in range(20):
            assert bytes(store.read("a.bin", (at, at + 9)).data) == DATA[at : at + 9]
        assert len(hub.asked) == 1
        for round_ in range(6):
            expired.update(signed)
            for at in range(3):
                assert bytes(store.read("a.bin", (at, at + 9)).data) == DATA[at : at + 9]
            assert round_ > 1 or len(hub.asked) == 2 + round_
        store.close()
        assert cdn.seen("authorization") == cdn.seen("x-api-key") == cdn.seen("cookie") == []


def test_a_redirect_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.stores.web_objects._KEPT_S", -1.0)
    with (
        scripted(lambda t, a: t.serve(DATA, a)) as cdn,
        scripted(lambda t, _: t.redirect(f"{cdn.url}/b")) as hub,
    ):
        store = open_store(hub.url, {})
        for at in range(3):
            assert bytes(store.read("a.bin", (at, at + 9)).data) == DATA[at : at + 9]
        store.close()
        assert len(hub.asked) == 3


def test_a_signed_url_that_is_for_get_only_reports_its_size_too() -> None:
    def at_the_cdn(talk: Talk, asked: Asked) -> None:
        if asked.method == "HEAD":
            talk.answer(403)
        else:
            talk.serve(DATA, asked)

    with scripted(at_the_cdn) as cdn, scripted(lambda t, _: t.redirect(f"{cdn.url}/b")) as hub:
        store = open_store(hub.url, {})
        found = store.info("a.bin")
        store.close()
        assert found is not None
        assert (found.size_bytes, found.version) == (len(DATA), "v1")


def test_redirects_have_an_end() -> None:
    with scripted(lambda t, a: t.redirect(f"{a.path}x")) as hub:
        store = open_store(hub.url, {})
        with pytest.raises(RequestError, match="redirects more than 10 times") as caught:
            store.read("a.bin", (0, 10))
        store.close()
        assert caught.value.kind == "refused"
        assert len(hub.asked) == 11


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "gopher://127.0.0.1/",
        "data:,x",
        "http://",
        "http://[::1",
        "//",
    ],
)
@pytest.mark.parametrize("what", ["info", "range", "walk"])
def test_no_redirect_leads_out_of_the_web(what: str, location: str) -> None:
    with scripted(lambda t, _: t.redirect(location)) as hub:
        store = open_store(hub.url, {"headers": HEADERS})
        with pytest.raises(RequestError, match="redirect") as caught:
            use(store, what)
        store.close()
        assert caught.value.kind == "refused"


def test_tls_is_never_given_up() -> None:
    with pytest.raises(RequestError, match="without TLS"):
        redirect_target("https://hub.example/a", "http://hub.example/a")
    assert (
        redirect_target("http://hub.example/a", "https://cdn.example/b") == "https://cdn.example/b"
    )
    assert redirect_target("https://hub.example/a/b", "../c?x=1#top") == "https://hub.example/c?x=1"
    assert redirect_target("http://h/a", "//user:hush@o:81/b") == "http://o:81/b"


def test_a_target_holds_nothing_that_ends_a_line() -> None:
    assert target_of("http://h") == "/"
    assert target_of("http://h/a%20b?x=%41&y=") == "/a%20b?x=%41&y="
    moved = redirect_target("http://h/a", "/b c\u00e9\x01?d e")
    assert target_of(moved).isascii()
    assert " " not in target_of(moved)


@given(st.text(max_size=60))
def test_any_location_is_followed_or_rejected(location: str) -> None:
    """A location leads to http or https, or is rejected; a request line stays one line."""
    try:
        found = redirect_target("https://hub.example/a?sig=1", location)
    except RequestError:
        return
    assert origin_of(found).scheme == "https"
    assert "@" not in origin_of(found).host
    assert target_of(found).isascii()
    assert not set(target_of(found)) & set("\r\n \0")


# -- from public to private ------------------------------------------------------------------------


PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"
"""No public address can be reached here, so one of this machine's plays it."""


def client(**more: Any) -> WebClient:
    pool = ConnectionPool(
        timeouts=Timeouts(connect_s=10.0, read_s=10.0, whole_s=20.0),
        tls=ssl.create_default_context,
        proxies=Proxies(),
        public=lambda address: address == PUBLIC,
        **more,
    )
    return WebClient(pool)


def read(web: WebClient, url: str) -> bytes:
    root, _, name = url.rpartition("/")
    address = StoreAddress(url=root, options={}, policy=FetchPolicy(), secrets=())
    return bytes(HttpStore(address, web, headers=HEADERS, scope="").read(name, (0, 10)).data)


@pytest.fixture
def web() -> Iterator[Callable[..., WebClient]]:
    made: list[WebClient] = []

    def make(**more: Any) -> WebClient:
        made.append(client(**more))
        return made[-1]

    yield make
    for each in made:
        each.abort()


def test_a_public_server_leads_to_no_private_one(web: Callable[..., WebClient]) -> None:
    with scripted(of_a_cdn, host=PRIVATE) as inside:
        with scripted(lambda t, _: t.redirect(f"{inside.url}/b"), host=PUBLIC) as outside:
            for _ in range(2):  # also where the connection is kept
                with pytest.raises(RequestError, match="public server redirects") as caught:
                    read(web(), f"{outside.url}/a")
                assert caught.value.kind == "refused"
            mine = web()
            assert read(mine, f"{inside.url}/b") == DATA[:10]
            assert inside.asked.pop()
            with pytest.raises(RequestError, match="public server redirects"):
                read(mine, f"{outside.url}/a")
        assert inside.asked == []


def test_a_private_detour_doesnt_help(web: Callable[..., WebClient]) -> None:
    """public -> public -> private: refused as well."""
    with (
        scripted(of_a_cdn, host=PRIVATE) as inside,
        scripted(lambda t, _: t.redirect(f"{inside.url}/b"), host=PUBLIC) as second,
        scripted(lambda t, _: t.redirect(f"{second.url}/b"), host=PUBLIC) as first,
    ):
        with pytest.raises(RequestError, match="public server redirects"):
            read(web(), f"{first.url}/a")
        assert inside.asked == []


@pytest.mark.parametrize("to", [PUBLIC, PRIVATE])
def test_from_private_to_anywhere_is_fine(web: Callable[..., WebClient], to: str) -> None:
    with (
        scripted(of_a_cdn, host=to) as there,
        scripted(lambda t, _: t.redirect(f"{there.url}/b"), host=PRIVATE) as inside,
    ):
        assert read(web(), f"{inside.url}/a") == DATA[:10]


def test_the_address_that_is_connected_to_is_judged(web: Callable[..., WebClient]) -> None:
    """A name that means a public address to one look and a private one to the next gains nothing:
    each connection judges its own."""
    names: dict[str, list[str]] = {"hub.test": [PUBLIC]}

    def resolve(host: str, port: int) -> list[tuple[int, Any]]:
        import socket

        return [(int(socket.AF_INET), (address, port)) for address in names.get(host, [host])]

    with scripted(of_a_cdn, host=PRIVATE) as inside, scripted(of_a_cdn, host=PUBLIC) as outside:
        port, far = inside.url.rpartition(":")[2], outside.url.rpartition(":")[2]

        def act(talk: Talk, asked: Asked) -> None:
            talk.redirect(f"http://cdn.test:{far if asked.path == '/far' else port}/b")

        with scripted(act, host=PUBLIC) as hub:
            at = hub.url.rpartition(":")[2]
            names["cdn.test"] = [PRIVATE]
            with pytest.raises(RequestError, match=r"cdn\.test"):
                read(web(resolve=resolve), f"http://hub.test:{at}/a")
            names["cdn.test"] = [PRIVATE, PUBLIC]  # the public one alone is tried
            assert read(web(resolve=resolve), f"http://hub.test:{at}/far") == DATA[:10]
        assert inside.asked == []


def test_a_remembered_redirect_is_judged_again(web: Callable[..., WebClient]) -> None:
    with scripted(of_a_cdn, host=PRIVATE) as inside:
        place = Hop(f"{inside.url}/b", is_origin=False, from_public=True)
        with pytest.raises(RequestError, match="public server redirects"):
            web().ask(place, WebRequest({}, HEADERS))
        assert inside.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("100.100.100.200", False),
        ("192.0.2.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("240.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:93.184.216.34", True),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:7f00:1::", False),
        ("2001:db8::1", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public
