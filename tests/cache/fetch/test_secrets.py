"""What a user's options hold is sent to the server and shown to nobody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import FetchError
from penstock.cache.base import FetchPolicy, ObjectRange
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store
from tests.cache.fetch.scripted import collect
from tests.cache.fetch.served import content
from tests.servers import Faults

if TYPE_CHECKING:
    from tests.servers import Server


@pytest.mark.parametrize("fault", [None, "500", "reset", "short", "other_etag"])
def test_no_secret_is_shown(
    server: Server, fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    secrets = [
        "hushKEY1234",
        "hushSECRET1",
        "hushTOKEN12",
        "hushSIGNED1",
        "hushUSER123",
        "hushPASS123",
    ]
    bare = server.url.removeprefix("http://")
    places: list[tuple[str, dict[str, Any]]] = [
        (
            "s3://bucket/set",
            {
                "key": secrets[0],
                "secret": secrets[1],
                "token": secrets[2],
                "endpoint_url": server.url,
            },
        ),
        (f"{server.url}/bucket/set?X-Amz-Signature={secrets[3]}&part=1", {}),
        (f"http://{secrets[4]}:{secrets[5]}@{bare}/bucket/set", {}),
        (f"{server.url}/bucket/set", {"headers": {"Authorization": f"Bearer {secrets[2]}"}}),
    ]
    policy = FetchPolicy(max_attempts=2, backoff_base_s=0.001)
    for url, options in places:
        server.faults = Faults()
        store = open_store(url, options)
        fetcher = Fetcher(store, policy=policy)
        assert bytes(fetcher.fetch_object("0.bin").data) == content(0)
        server.faults = Faults(p=1.0 if fault else 0.0, kinds=(fault or "500",))
        spans = [ObjectRange(path="0.bin", start=0, end=100, version="other")]
        for attempt in (
            lambda fetcher=fetcher, spans=spans: collect(fetcher, spans),
            lambda fetcher=fetcher: fetcher.fetch_object("nowhere"),
        ):
            with pytest.raises(FetchError) as caught:
                attempt()
            shown += [str(caught.value), repr(caught.value), caught.value.uri]
            assert caught.value.__cause__ is None
        shown += [repr(store), store.url, store.scope, repr(fetcher.meter.snapshot())]
        fetcher.close()
    text = "\n".join([*shown, caplog.text])
    assert [secret for secret in secrets if secret in text] == []


def test_signed_urls_and_user_info_reach_the_server(server: Server) -> None:
    bare = server.url.removeprefix("http://")
    fetcher = Fetcher(open_store(f"http://us%40er:pa%3Ass@{bare}/bucket/set?sig=abcdef", {}))
    assert len(list(fetcher.walk())) == 4
    assert bytes(fetcher.fetch_object("0.bin").data) == content(0)
    import base64

    sent = server.headers_of["/bucket/set/0.bin"]["authorization"]
    assert base64.b64decode(sent.removeprefix("Basic ")) == b"us@er:pa:ss"
    fetcher.close()
