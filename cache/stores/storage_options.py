"""Read the URL and the storage_options that a store is opened from, and what must never be shown.

fsspec's names (s3fs, gcsfs, adlfs, fsspec's http) and obstore's own are both understood; a name
that neither knows is an error, because a misspelt option that is ignored shows up as a 403 or a
hang much later. Names that only tune fsspec's own buffers are accepted and mean nothing here.
The usual environment (AWS_*, GOOGLE_*, AZURE_*) is read by obstore itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base import FetchPolicy
from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact
from penstock.cache.stores.tls import certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """A StoreAddress is what a store is opened from: a URL and its storage_options.

    scheme: in lower case; policy: timeouts that the options give; secrets: texts of both that must
    not be shown.
    """

    url: str
    scheme: str
    options: Mapping[str, Any]
    policy: FetchPolicy
    secrets: tuple[str, ...]

    @property
    def display_url(self) -> str:
        """The URL for people, without credentials."""
        return redact(self.url).rstrip("/")


def scope_of(*parts: str) -> str:
    """Hash what a store is made of, so that two stores of one URL are told apart."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def header_texts(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Make text of headers' names and values. Raises ConfigError for what no header can hold."""
    found = {}
    for name, value in headers.items():
        texts = [
            each.decode("latin-1") if isinstance(each, bytes) else str(each)
            for each in (name, value)
        ]
        if any(mark in text for text in texts for mark in "\r\n\0") or ":" in texts[0]:
            raise ConfigError(
                f"storage_options: headers: {texts[0][:40]!r} can't be sent as a header: wanted "
                "a name without a colon, and no line breaks in its value."
            )
        found[texts[0]] = texts[1]
    return found


def split_words(text: str) -> frozenset[str]:
    """The words of a text, for tables of names."""
    return frozenset(text.split())


FETCH_OPTIONS = ("connect_timeout", "read_timeout", "retry_timeout")
"""Seconds: to make a connection; without a byte on one; for all attempts of a range."""

_NO_MEANING = split_words(
    "access asynchronous batch_size block_size cache_options cache_regions cache_size_limit "
    "cache_timeout cache_type check_connection consistency default_block_size default_cache_type "
    "default_fill_cache default_intelligent_cache encoded fill_cache fixed_upload_size "
    "listings_expiry_time loop max_concurrency max_paths project same_names "
    "secure_serialize simple_links skip_instance_cache use_listings_cache version_aware"
)
_ENDPOINTS = ("endpoint", "base_url")


@dataclass(slots=True)
class StoreOptions:
    """StoreOptions are what a user's storage_options mean to obstore and the web client.

    config: of the store; client: obstore's client_options; profile: of ~/.aws; retries: what was
    said of them.
    """

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    retries: dict[str, Any] = field(default_factory=dict)


def fetch_policy(options: Mapping[str, Any]) -> FetchPolicy:
    """Read the timeouts (in seconds) and attempts that storage_options give. Raises ConfigError."""
    retry = options.get("retry_config")
    retry = retry if isinstance(retry, dict) else {}
    client = options.get("client_options")
    client = client if isinstance(client, dict) else {}
    given: dict[str, Any] = {}
    for name, other in (
        ("connect_timeout", client.get("connect_timeout")),
        ("read_timeout", client.get("read_timeout")),
        ("retry_timeout", retry.get("retry_timeout")),
    ):
        value = options.get(name, other)
        if value is not None:
            given[f"{name}_s"] = parse_seconds(value, name)
    if (retries := retry.get("max_retries")) is not None:
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"max_retries: got {retries!r}, wanted a whole number from 0.")
        given["max_attempts"] = retries + 1
    return FetchPolicy(**given)


def parse_seconds(value: Any, name: str) -> float:
    """Seconds of a number, a timedelta, or a text of a number and "s", "ms", "m" or "min"."""
    if hasattr(value, "total_seconds"):
        value = value.total_seconds()
    elif isinstance(value, str):
        number = value.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = value.strip()[len(number) :].strip() or "s"
        factor = {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "m": 60, "min": 60}.get(unit)
        try:
            value = float(number) * factor if factor else None
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        # Not what it is: what was put there by mistake may be a secret.
        raise ConfigError(f"{name}: wanted a number of seconds above 0, such as 20 or 0.5.")
    return float(value)


def read_options(
    scheme: str,
    options: Mapping[str, Any],
    names: frozenset[str],
    aliases: Mapping[str, str],
    special: Mapping[str, Callable[[StoreOptions, Any], None]],
    *,
    strip: str,
) -> StoreOptions:
    """Read a scheme's storage_options. Raises ConfigError for a name that nobody knows.

    names: obstore's own, with or without the prefix `strip`; aliases: other names for those;
    special: what sets more than one thing.
    """
    found = StoreOptions()
    # Nested ones first: what is said at the top level counts more.
    for name in sorted(options, key=lambda name: name not in special):
        value = options[name]
        bare = _bare(name, strip)
        if name in special:
            special[name](found, value)
        elif name in aliases:
            set_option(found, aliases[name], value)
        elif bare in names:
            set_option(found, bare, value)
        elif name not in _NO_MEANING and name not in FETCH_OPTIONS:
            known = sorted({*special, *aliases, *names, *FETCH_OPTIONS})
            raise ConfigError(
                f"storage_options: {name!r} is unknown for {scheme}://. Known names: "
                f"{', '.join(known)}."
            )
    for name in _ENDPOINTS:
        if found.config.get(name) is not None:
            _check_endpoint(found.config[name])
    return found


def _check_endpoint(value: Any) -> None:
    """obstore panics at some that aren't URLs, and misunderstands others."""
    from penstock.cache.stores.web_address import origin_of

    try:
        origin_of(str(value))
    except (ValueError, UnicodeError):
        shown = redact(str(value)).partition("?")[0]
        raise ConfigError(
            f"storage_options: endpoint_url: got {shown!r}, wanted a URL such as "
            '"https://minio.example:9000" or "http://127.0.0.1:9000", with its scheme.'
        ) from None


def _bare(name: str, strip: str) -> str:
    short = strip.partition("_")[0] + "_" if strip else ""
    return name.removeprefix(strip).removeprefix(short)


def set_option(found: StoreOptions, name: str, value: Any) -> None:
    """Set an option of the store, but for None: fsspec's way to say "not given"."""
    if value is not None:
        found.config[name] = value


def option_mapping(value: Any, name: str) -> dict[str, Any]:
    """An option that holds others; none for None. Raises ConfigError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"storage_options: {name}: got a {type(value).__name__}, wanted a dictionary."
        )
    return value


def unknown_option_error(where: str, name: str, known: str) -> ConfigError:
    """The error for a name inside another option that nobody knows."""
    return ConfigError(f"storage_options: {where}[{name!r}] is unknown. Known names: {known}.")


def client_options(found: StoreOptions, value: Any) -> None:
    """Take obstore's client_options as they are: obstore refuses what it doesn't know."""
    given = dict(option_mapping(value, "client_options"))
    if (own := given.pop("root_certificate", None)) is not None:
        found.client["root_certificate"] = certificates(own, "root_certificate")
    found.client.update(given)


def _retry_config(found: StoreOptions, value: Any) -> None:
    """obstore's retry_config: its limits become the fetcher's (see `fetch_policy`)."""
    found.retries.update(option_mapping(value, "retry_config"))


def set_verify(found: StoreOptions, value: Any) -> None:
    """Take a `verify` of requests or botocore: True, False, or a path of authorities."""
    if isinstance(value, bool):
        found.client["allow_invalid_certificates"] = not value
    elif value is not None:
        found.client["root_certificate"] = certificates(value, "verify")


def _root_certificate(found: StoreOptions, value: Any) -> None:
    if value is not None:
        found.client["root_certificate"] = certificates(value, "root_certificate")


COMMON_OPTIONS: dict[str, Callable[[StoreOptions, Any], None]] = {
    "root_certificate": _root_certificate,
    "verify": set_verify,
    "client_options": client_options,
    "retry_config": _retry_config,
}
