"""Keep credentials out of everything that is shown or stored: messages, logs, names, metrics."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# A login is all up to the last "@" before a slash, or a password with slashes, which is no port.
# The user of abfs://container@account is the container, which is shown unless a password follows.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.\-]*)://"
_LOGIN = re.compile(
    _SCHEME + r"(?:([^/?#\s'\"<>]*)@|([^/@:?#\s]+:(?!\d{1,5}(?:/|$))[^@?#\s'\"<>]*)@)"
)
_LEADING_LOGIN = re.compile(
    _SCHEME + r"(?:((?:(?!: )[^/?#\n])*)@|"
    r"([^/@:?#\s]+:(?!\s|\d{1,5}(?:[/\s]|$))(?:(?!: )[^?#\n])*)@)(?=[^\s@/]+(?:/|$|\?))"
)
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"<>]*")
_SECRET_NAME = re.compile(r"key|secret|token|password|passwd|credential|sas|auth|sign|cookie", re.I)
# AWS, Google, Azure and CloudFront use these query parameters in signed URLs.
_SIGNATURE_NAME = re.compile(
    r"x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|expires|policy|sig|s[a-z]|sk[a-z]+|ske|spr",
    re.I,
)
_SHORTEST_SECRET = 4
"""A shorter value isn't treated as a secret, because removing it would garble messages."""


def redact(text: str) -> str:
    """Return `text` without user names, passwords and query strings (signatures) in its URLs.

    A password may contain "@", ":" or "/", and a space if the text begins with its URL.
    """
    if "://" not in text:
        return text
    if leading := _LEADING_LOGIN.match(text):
        text = _without_login(leading) + text[leading.end() :]
    return _QUERY.sub(r"\1", _LOGIN.sub(_without_login, text))


def _without_login(found: re.Match[str]) -> str:
    scheme, login = found[1], next((each for each in found.groups()[1:] if each), "")
    if scheme.lower() in ("abfs", "abfss") and ":" not in login:
        return found[0]  # the container of abfs://container@account
    return f"{scheme}://"


def escape(text: str) -> str:
    """Return `text` on one line: control, bidirectional and other unprintable characters, and bytes
    that weren't UTF-8, become backslash escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    code = ord(c)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that wasn't UTF-8, as surrogateescape carries it
        return f"\\x{code - 0xDC00:02x}"
    return c.encode("unicode_escape").decode("ascii")


def safe_text(text: str, *, one_line: bool = True) -> str:
    """Return `text` without credentials and without characters that control a terminal."""
    text = redact(text)
    return escape(text) if one_line else "\n".join(map(escape, text.split("\n")))


class SafeLog(logging.Filter):
    """A log filter that removes credentials and control characters from all log lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Clean the message and the arguments of a record; return True for every record."""
        if isinstance(record.args, tuple):
            record.args = tuple(map(_safe_value, record.args))
        record.msg = safe_text(str(record.msg), one_line=False)
        return True


def _safe_value(value: object) -> object:
    return safe_text(str(value)) if isinstance(value, str | BaseException) else value


def hide(text: str, secrets: tuple[str, ...]) -> str:
    """Return `text` redacted, with each of `secrets` replaced by "…"."""
    text = redact(text)
    for secret in secrets:
        text = text.replace(secret, "…")
    return text


def find_secrets(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of storage options that must not be shown, at any depth; longest first."""
    return tuple(sorted(set(_secrets(options, secret=False)), key=len, reverse=True))


def url_secrets(url: str) -> tuple[str, ...]:
    """Return the user name, password and query values of a URL; longest first."""
    try:
        parts = urlsplit(url)
        found = {parts.username or "", parts.password or "", parts.query}
        found |= {unquote(text) for text in found}
        found |= {quote(text, safe="") for text in found}
    except ValueError:  # not a URL; opening it raises the error
        return ()
    found |= {value for _, value in parse_qsl(parts.query)}
    if parts.scheme in ("abfs", "abfss"):
        found.discard(parts.username or "")
    kept = {text for text in found if len(text) >= _SHORTEST_SECRET}
    return tuple(sorted(kept, key=len, reverse=True))


def plain_query(url: str) -> list[tuple[str, str]]:
    """Return the query parameters of a URL that choose the data, without signatures and keys."""
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    return [
        (name, value)
        for name, value in pairs
        if not (_SIGNATURE_NAME.fullmatch(name) or _SECRET_NAME.search(name))
    ]


def _secrets(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets(inner, secret=secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, secret=secret)
    elif isinstance(value, bytes) and secret and value:
        yield value.decode("utf-8", "replace")
    elif isinstance(value, str) and secret and value:
        yield value
    elif isinstance(value, str):
        yield from url_secrets(value)


def store_scope(options: Mapping[str, Any]) -> str:
    """Hash the options that distinguish stores of one URL (an endpoint, an account), to hex digits.

    Secrets are left out."""
    plain = repr(sorted((k, repr(v)) for k, v in _plain(options).items()))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in options.items() if not _SECRET_NAME.search(str(k))}
    return {k: _plain(v) if isinstance(v, dict) else v for k, v in kept.items()}


def clean_message(error: BaseException, secrets: tuple[str, ...]) -> str:
    """Return an exception's type and text without credentials."""
    text = hide(str(error), secrets)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
