"""Read the URL, the storage_options and the secrets of a store.

The names of fsspec (s3fs, gcsfs, adlfs, fsspec's http) and of obstore are both supported. A name
that neither knows is an error, because ignoring a misspelt option causes a 403 or a hang much
later. Names that only tune fsspec's own buffers are accepted and ignored. obstore itself reads the
usual environment variables (AWS_*, GOOGLE_*, AZURE_*).
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
    """The URL and the storage_options of a store.

    scheme: the URL's scheme in lower case. policy: the timeouts of the options. secrets: the texts
    of the URL and the options that must not be shown.
    """

    url: str
    scheme: str
    options: Mapping[str, Any]
    policy: FetchPolicy
    secrets: tuple[str, ...]

    @property
    def display_url(self) -> str:
        """The URL without credentials, for messages."""
        return redact(self.url).rstrip("/")


def scope_of(*parts: str) -> str:
    """Hash the parts that distinguish two stores of one URL."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def header_texts(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Convert headers to text. Raises ConfigError for names and values that no header can hold."""
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
    """Split a table of names at its spaces."""
    return frozenset(text.split())


FETCH_OPTIONS = ("connect_timeout", "read_timeout", "retry_timeout")
"""Time limits in seconds: to connect, to receive a byte, and for all attempts of a range."""

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
    """A user's storage_options, translated for obstore and the web client.

    config: the arguments of obstore's store. client: obstore's client_options. profile: the name of
    a profile in ~/.aws, or None. retries: obstore's retry_config.
    """

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    retries: dict[str, Any] = field(default_factory=dict)


def fetch_policy(options: Mapping[str, Any]) -> FetchPolicy:
    """Read the timeouts (in seconds) and attempts from storage_options. Raises ConfigError."""
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
            raise ConfigError(f"max_retries: got {retries!r}, wanted an integer of at least 0.")
        given["max_attempts"] = retries + 1
    return FetchPolicy(**given)


def parse_seconds(value: Any, name: str) -> float:
    """Parse seconds from a number, a timedelta, or a number and "s", "ms", "m" or "min".

    Raises ConfigError.
    """
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
        # The message doesn't show the value, which may be a misplaced secret.
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
    """Read a scheme's storage_options. Raises ConfigError for an unknown name.

    names: obstore's own, with or without the prefix `strip`; aliases: other names for those;
    special: the functions of options that need conversion or set several values.
    """
    found = StoreOptions()
    short = strip.partition("_")[0] + "_" if strip else ""
    # Nested options first, so that those at the top level override them.
    for name in sorted(options, key=lambda name: name not in special):
        value = options[name]
        bare = name.removeprefix(strip).removeprefix(short)
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
    """Raise ConfigError for an endpoint that is no URL, at which obstore may panic."""
    from penstock.cache.stores.web_address import origin_of

    try:
        origin_of(str(value))
    except (ValueError, UnicodeError):
        shown = redact(str(value)).partition("?")[0]
        raise ConfigError(
            f"storage_options: endpoint_url: got {shown!r}, wanted a URL such as "
            '"https://minio.example:9000" or "http://127.0.0.1:9000", with its scheme.'
        ) from None


def set_option(found: StoreOptions, name: str, value: Any) -> None:
    """Set an option of the store unless it is None, which fsspec uses for "not given"."""
    if value is not None:
        found.config[name] = value


def option_mapping(value: Any, name: str) -> dict[str, Any]:
    """Return the dictionary of a nested option; {} for None. Raises ConfigError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"storage_options: {name}: got a {type(value).__name__}, wanted a dictionary."
        )
    return value


def unknown_option_error(where: str, name: str, known: str) -> ConfigError:
    """Return the error for an unknown name in a nested option."""
    return ConfigError(f"storage_options: {where}[{name!r}] is unknown. Known names: {known}.")


def client_options(found: StoreOptions, value: Any) -> None:
    """Pass on obstore's client_options unchecked: obstore refuses unknown ones."""
    given = dict(option_mapping(value, "client_options"))
    if (own := given.pop("root_certificate", None)) is not None:
        found.client["root_certificate"] = certificates(own, "root_certificate")
    found.client.update(given)


def set_verify(found: StoreOptions, value: Any) -> None:
    """Read the `verify` of requests or botocore: True, False, or a path of authorities."""
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
    # The limits of obstore's retry_config become the fetcher's, see `fetch_policy`.
    "retry_config": lambda found, value: found.retries.update(
        option_mapping(value, "retry_config")
    ),
}
