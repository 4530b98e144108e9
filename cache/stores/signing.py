"""URLs that obstore signs, so that the web client can fetch a bucket's objects."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from datetime import timedelta
from typing import Any

from penstock.cache.stores.obstore_process import rust_errors

_SIGNED_FOR = timedelta(hours=1)
_USED_S, _MOST_KEPT = 60.0, 4096


class UnsignableError(Exception):
    """obstore can't sign a URL here: without a key of its own it has to ask somebody."""


class Signer:
    """A Signer makes URLs of keys, each used for a minute. anonymous: without the signature."""

    def __init__(self, store: Any, *, anonymous: bool) -> None:
        self._store = store
        self._anonymous = anonymous
        self._lock = threading.Lock()
        self._signed: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __call__(self, method: str, key: str) -> str:
        """The URL of a key for a method. Raises UnsignableError."""
        now_s = time.monotonic()
        with self._lock:
            url, until_s = self._signed.get((method, key), ("", 0.0))
        if now_s < until_s:
            return url
        url = self._sign(method, key)
        with self._lock:
            self._signed[method, key] = url, now_s + _USED_S
            while len(self._signed) > _MOST_KEPT:
                self._signed.popitem(last=False)
        return url

    def _sign(self, method: str, key: str) -> str:
        import obstore

        try:
            with rust_errors():
                url = str(obstore.sign(self._store, method, key, _SIGNED_FOR))  # type: ignore[call-overload]
        except Exception as error:  # obstore's tree; its own requests tell what is wrong
            raise UnsignableError(type(error).__name__) from None
        return url.partition("?")[0] if self._anonymous else url
