"""Ranges by urllib, for stores that have just asked for patience.

obstore tells that a request was throttled, but not the Retry-After header that says for how long.
So what follows a throttled request goes this way, which costs more CPU time a byte, and shows it.
"""

from __future__ import annotations

import email.utils
import re
from http.client import HTTPException
from typing import TYPE_CHECKING

from cache.fsspec_store import failed_request
from cache.store import Answer, RequestError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class PlainGet:
    """GET of ranges. url_of: of an object's key, signed where the store wants that; headers: of
    each request; tls: for https."""

    def __init__(
        self,
        url_of: Callable[[str], str],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        secrets: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url_of = url_of
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._secrets = secrets
        self._tls = tls

    def read(self, key: str, span: tuple[int, int], *, if_match: str | None) -> Answer:
        """Bytes [start, end) of an object. Raises RequestError, with retry_after_s where the server
        says it."""
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        headers = {**self._headers, "Range": f"bytes={span[0]}-{span[1] - 1}"}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        try:
            request = Request(self._url_of(key), headers=headers)
            with urlopen(request, timeout=self._timeout_s, context=self._tls) as answer:
                told = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if answer.status != 206 or told is None:
                    raise RequestError(
                        "transient", f"the server answered a range with status {answer.status}"
                    )
                data = answer.read(span[1] - span[0] + 1)
                version = _version(answer.headers, int(told[3]))
        except (OSError, HTTPException) as error:
            if isinstance(error, HTTPError):
                error.close()  # it is the answer, too
            raise failed_request(error, self._secrets) from None
        if int(told[1]) != span[0] or len(data) != span[1] - span[0]:
            raise RequestError(
                "transient", f"{len(data)} bytes from {told[1]} came, wanted {span[0]}-{span[1]}"
            )
        return Answer(data=data, version=version, object_bytes=int(told[3]))


def _version(headers: Mapping[str, str], size_bytes: int) -> str:
    """As `cache.obstore_store` writes it."""
    if tag := headers.get("ETag"):
        return tag.replace('"', "")
    try:
        time_s = email.utils.parsedate_to_datetime(headers.get("Last-Modified", "")).timestamp()
    except (TypeError, ValueError):
        return ""
    return f"{size_bytes}-{time_s:.6f}"
