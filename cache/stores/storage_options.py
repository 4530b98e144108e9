"""Read the URL, the storage_options and the secrets of a store.

The names of fsspec (s3fs and botocore inside it, gcsfs, adlfs, fsspec's http and aiohttp inside it)
and of obstore are supported. A name that none knows is an error, because ignoring a misspelt option
causes a 403 or a hang much later. Names that only tune fsspec's own buffers are accepted and
ignored. obstore itself reads the usual environment variables (AWS_*, GOOGLE_*, AZURE_*).

Each kind of store has one table of names. A name inside a dictionary is written with a dot:
config_kwargs.proxies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.cache.base import FetchPolicy
from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact
from penstock.cache.stores.web_address import basic_auth, origin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The URL and the storage_options of a store.

    policy: the timeouts of the options. secrets: the texts of the URL and the options that must not
    be shown.
    """

    url: str
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


# -- limits

FETCH_OPTIONS = ("connect_timeout", "read_timeout", "retry_timeout")
"""Time limits in seconds: to connect, to receive a byte, and for all attempts of a range."""


def fetch_policy(options: Mapping[str, Any]) -> FetchPolicy:
    """Read the timeouts (in seconds) and attempts from storage_options. Raises ConfigError."""
    nested: dict[str, Any] = {}
    for group in ("config_kwargs", "client_options", "retry_config"):
        inner = options.get(group)
        nested |= inner if isinstance(inner, dict) else {}
    given: dict[str, Any] = {}
    for name in FETCH_OPTIONS:
        value = options.get(name)
        value = nested.get(name) if value is None else value
        if value is not None:
            given[f"{name}_s"] = parse_seconds(value, name)
    if (retries := nested.get("max_retries")) is not None:
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"max_retries: got {retries!r}, wanted an integer of at least 0.")
        given["max_attempts"] = retries + 1
    return FetchPolicy(**given)


_UNITS = {"": 1, "s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "m": 60, "min": 60}


def parse_seconds(value: Any, name: str) -> float:
    """Parse seconds from a number, a timedelta, or a number and "s", "ms", "m" or "min".

    Raises ConfigError.
    """
    if hasattr(value, "total_seconds"):
        value = value.total_seconds()
    elif isinstance(value, str):
        number = value.rstrip("abcdefghijklmnopqrstuvwxyz ")
        with contextlib.suppress(ValueError, KeyError):
            value = float(number) * _UNITS[value[len(number) :].strip()]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        # The message doesn't show the value, which may be a misplaced secret.
        raise ConfigError(f"{name}: wanted a number of seconds above 0, such as 20 or 0.5.")
    return float(value)


# -- tables of options


@dataclass(slots=True)
class StoreOptions:
    """A user's storage_options, translated for obstore and the web client.

    config: the arguments of obstore's store, and `profile`, the name of a profile in ~/.aws.
    client: obstore's client_options; its default_headers are texts.
    """

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)


Setter = Callable[[StoreOptions, Any], None]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _meanings(text: str) -> dict[str, str]:
    """Parse words of the form name=meaning."""
    pairs = (word.partition("=") for word in text.split())
    return {name: meaning for name, _, meaning in pairs}


_NO_MEANING = _words(
    "access asynchronous batch_size block_size cache_options cache_regions cache_size_limit "
    "cache_timeout cache_type check_connection consistency default_block_size default_cache_type "
    "default_fill_cache default_intelligent_cache encoded fill_cache fixed_upload_size "
    "listings_expiry_time loop max_concurrency max_paths project same_names "
    "secure_serialize simple_links skip_instance_cache use_listings_cache version_aware "
    # The limits are read by fetch_policy; the endpoint's scheme decides between http and https.
    "connect_timeout read_timeout retry_timeout retry_config use_ssl client_kwargs.use_ssl "
    "client_kwargs.config client_kwargs.api_version client_kwargs.service_name "
    "client_kwargs.timeout client_kwargs.connector client_kwargs.trust_env "
    "client_kwargs.raise_for_status config_kwargs.connect_timeout config_kwargs.read_timeout "
    "config_kwargs.retries config_kwargs.max_pool_connections config_kwargs.tcp_keepalive "
    "client_options.connect_timeout client_options.read_timeout"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """The storage_options of one kind of store.

    names: obstore's own names, with or without one of the prefixes. others: the option of obstore
    that another name means, or the function that reads its value. groups: the options that are
    dictionaries of options. kind: the name of obstore's class. places: obstore's options that
    distinguish stores of one URL.
    """

    scheme: str
    kind: str = ""
    places: tuple[str, str] = ("", "")
    names: frozenset[str]
    others: Mapping[str, str | Setter]
    prefixes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("client_options",)

    def read(self, options: Mapping[str, Any]) -> StoreOptions:
        """Read storage_options; None means that an option isn't given. Raises ConfigError, also for
        an unknown name."""
        found = StoreOptions()
        # Nested options first, so that those at the top level override them.
        for name, value in sorted(self._flat(options), key=lambda item: "." not in item[0]):
            meaning = self._meaning(name)
            if value is None or not meaning:
                continue
            if callable(meaning):
                meaning(found, value)
            else:
                found.config[meaning] = value
        for name in ("endpoint", "base_url"):
            if name in found.config:
                _check_endpoint(found.config[name])
        return found

    def scope(self, options: StoreOptions) -> str:
        """Hash the options that distinguish two stores of one URL."""
        places = (str(options.config.get(name, "")).rstrip("/") for name in self.places)
        return scope_of(self.scheme, *places)

    def _flat(self, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield all options, with the names of nested ones joined by dots."""
        for name, value in options.items():
            if name not in self.groups:
                yield name, value
                continue
            for inner, nested in _mapping(value, name).items():
                yield f"{name}.{inner}", nested

    def _meaning(self, name: str) -> str | Setter:
        """Return the option of obstore that a name means, or the function that reads its value; ""
        if it has no meaning here. Raises ConfigError."""
        if name in _NO_MEANING:
            return ""
        # The arguments of a client are options of the store.
        bare = name.removeprefix("client_kwargs.")
        if bare in self.others:
            return self.others[bare]
        for prefix in self.prefixes:
            bare = bare.removeprefix(prefix)
        if bare in self.names:
            return bare
        group = name.rpartition(".")[0].replace("client_kwargs", "")
        known = {*self.others, *self.names, *FETCH_OPTIONS}
        shown = sorted(each for each in known if each.rpartition(".")[0] == group)
        raise ConfigError(
            f"storage_options: {name!r} is unknown for {self.scheme}://. Known names: "
            f"{', '.join(shown)}."
        )


def _mapping(value: Any, name: str) -> dict[str, Any]:
    """Return the dictionary of a nested option; {} for None. Raises ConfigError."""
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"storage_options: {name}: got a {type(value).__name__}, wanted a dictionary."
        )
    return value or {}


def _check_endpoint(value: Any) -> None:
    """Raise ConfigError for an endpoint that is no URL, at which obstore may panic."""
    try:
        origin_of(str(value))
    except (ValueError, UnicodeError):
        shown = redact(str(value)).partition("?")[0]
        raise ConfigError(
            f"storage_options: endpoint_url: got {shown!r}, wanted a URL such as "
            '"https://minio.example:9000" or "http://127.0.0.1:9000", with its scheme.'
        ) from None


# -- options of all stores

_BEGIN = "-----BEGIN CERTIFICATE-----"
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SUFFIXES = (".crt", ".pem", ".cer", ".0")


def certificates(value: Any, name: str) -> bytes:
    """Return the PEM of certificate authorities, given as text or bytes, or as the path of a file
    or folder. name: of the option, for the error. Raises ConfigError."""
    try:
        pem = value.encode() if isinstance(value, str) and _BEGIN in value else value
        if not (isinstance(pem, bytes) and _BEGIN.encode() in pem):
            pem = b"\n".join(_files(os.fsdecode(os.path.expanduser(value))))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"storage_options: {name}: the certificates can't be read ({reason}). Wanted the "
            "path of a file (or a folder of files) in PEM format, or its text."
        ) from None
    pem = b"\n".join(_BLOCK.findall(pem)) + b"\n"  # some files hold comments in any encoding
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"storage_options: {name}: found no certificates in PEM format. Wanted a file with "
            f"{_BEGIN} in it (openssl x509 -inform der -in FILE makes one of a DER file)."
        ) from None
    return pem


def _files(path: str) -> Iterator[bytes]:
    if os.path.isdir(path):
        for name in sorted(os.listdir(path)):
            if name.endswith(_SUFFIXES):
                yield from _files(os.path.join(path, name))
        return
    with open(path, "rb") as file:
        yield file.read()


def _headers(found: StoreOptions, value: Any) -> None:
    """Convert headers to text. Raises ConfigError for names and values that no header can hold."""
    headers = found.client.setdefault("default_headers", {})
    for pair in _mapping(value, "headers").items():
        name, text = (
            each.decode("latin-1") if isinstance(each, bytes) else str(each) for each in pair
        )
        if any(mark in name + text for mark in "\r\n\0") or ":" in name:
            raise ConfigError(
                f"storage_options: headers: {name[:40]!r} can't be sent as a header: wanted "
                "a name without a colon, and no line breaks in its value."
            )
        headers[name] = text


def _auth(found: StoreOptions, value: Any) -> None:
    _headers(found, {"Authorization": basic_auth(value)})


def _verify(found: StoreOptions, value: Any) -> None:
    """Read the `verify` of requests or botocore: True, False, or a path of authorities."""
    if isinstance(value, bool):
        found.client["allow_invalid_certificates"] = not value
    else:
        found.client["root_certificate"] = certificates(value, "verify")


def _root_certificate(found: StoreOptions, value: Any) -> None:
    found.client["root_certificate"] = certificates(value, "root_certificate")


def _client(name: str) -> Setter:
    """Return the function that reads one of obstore's client_options."""
    return lambda found, value: found.client.__setitem__(name, value)


_COMMON: dict[str, str | Setter] = {
    **{
        f"client_options.{name}": _client(name)
        for name in _words(
            "allow_http allow_invalid_certificates default_content_type http1_only "
            "http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle "
            "http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate "
            "proxy_excludes proxy_url randomize_addresses timeout user_agent"
        )
    },
    "client_options.default_headers": _headers,
    "client_options.root_certificate": _root_certificate,
    "root_certificate": _root_certificate,
    "verify": _verify,
}

HTTP_OPTIONS = OptionTable(
    scheme="http",
    names=frozenset(),
    others={**_COMMON, "headers": _headers, "auth": _auth, "ssl": _verify},
    groups=("client_options", "client_kwargs"),
)


# -- options of s3


def _addressing(found: StoreOptions, value: Any) -> None:
    if _mapping(value, "config_kwargs.s3").get("addressing_style") == "virtual":
        found.config["virtual_hosted_style_request"] = True


def _proxies(found: StoreOptions, value: Any) -> None:
    proxies = _mapping(value, "config_kwargs.proxies")
    if proxy := proxies.get("https") or proxies.get("http"):
        found.client["proxy_url"] = proxy


def _signature(found: StoreOptions, value: Any) -> None:
    if not isinstance(value, str):  # botocore.UNSIGNED, a class; versions are texts
        found.config["skip_signature"] = True


S3_OPTIONS = OptionTable(
    scheme="s3",
    kind="S3Store",
    places=("endpoint", ""),
    names=_words(
        "access_key_id bucket_name checksum_algorithm conditional_put "
        "container_authorization_token_file "
        "container_credentials_full_uri container_credentials_relative_uri copy_if_not_exists "
        "default_region disable_tagging disable_bulk_delete endpoint imdsv1_fallback "
        "metadata_endpoint region request_payer role_arn role_session_name s3_express "
        "secret_access_key server_side_encryption session_token skip_signature "
        "sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id sts_endpoint "
        "unsigned_payload virtual_hosted_style_request web_identity_token_file"
    ),
    others={
        **_COMMON,
        **_meanings(
            "key=access_key_id username=access_key_id secret=secret_access_key "
            "password=secret_access_key token=session_token anon=skip_signature "
            "endpoint_url=endpoint region_name=region config_kwargs.region_name=region "
            "requester_pays=request_payer profile=profile"
        ),
        "config_kwargs.s3": _addressing,
        "config_kwargs.proxies": _proxies,
        "config_kwargs.signature_version": _signature,
    },
    prefixes=("aws_",),
    groups=("client_options", "client_kwargs", "config_kwargs"),
)


# -- options of gs and az


def _token(found: StoreOptions, value: Any) -> None:
    """Read gcsfs's token: a method's name, a credentials file, its content, or an access token."""
    if value in ("google_default", "cloud", "cache"):
        return
    if value == "anon":
        found.config["skip_signature"] = True
    elif isinstance(value, dict):
        found.config["service_account_key"] = json.dumps(value)
    elif isinstance(value, str) and (os.path.sep in value or value.endswith(".json")):
        found.config["application_credentials"] = os.path.expanduser(value)
    elif isinstance(value, str) and value != "browser":
        found.config["bearer_token"] = value
    elif isinstance(token := getattr(value, "token", None), str):
        found.config["bearer_token"] = token
    else:
        raise ConfigError(
            'storage_options: token: wanted "anon", "google_default", a file of credentials, '
            f"its content as a dictionary, or an access token; got {type(value).__name__}. For "
            "other logins pass a gcsfs file system object."
        )


GCS_OPTIONS = OptionTable(
    scheme="gs",
    kind="GCSStore",
    places=("base_url", ""),
    names=_words(
        "service_account service_account_path service_account_key base_url bearer_token "
        "application_credentials skip_signature"
    ),
    others={
        **_COMMON,
        **_meanings("anon=skip_signature endpoint_url=base_url endpoint=base_url"),
        "token": _token,
    },
    prefixes=("google_",),
)


_CONNECTION_STRING = _meanings(
    "accountname=account_name accountkey=account_key sharedaccesssignature=sas_key "
    "blobendpoint=endpoint"
)


def _connection_string(found: StoreOptions, value: Any) -> None:
    for pair in str(value).split(";"):
        name, _, inner = pair.partition("=")
        if (known := _CONNECTION_STRING.get(name.strip().lower())) and inner:
            found.config[known] = inner


def _credential(found: StoreOptions, value: Any) -> None:
    """Read adlfs's credential: an account key or a SAS token."""
    if not isinstance(value, str):
        raise ConfigError(
            "storage_options: credential: wanted an account key or a SAS token as text, got "
            f"{type(value).__name__}. Use client_id, client_secret and tenant_id, or pass an "
            "adlfs file system object."
        )
    is_sas = value.startswith("?") or "sig=" in value
    found.config["sas_key" if is_sas else "account_key"] = value.removeprefix("?")


def _sas_token(found: StoreOptions, value: Any) -> None:
    found.config["sas_key"] = str(value).removeprefix("?")


AZURE_OPTIONS = OptionTable(
    scheme="az",
    kind="AzureStore",
    places=("account_name", "endpoint"),
    names=_words(
        "account_name account_key client_id client_secret credential_type tenant_id "
        "authority_host authority_id sas_key token use_emulator use_fabric_endpoint endpoint "
        "msi_endpoint object_id msi_resource_id federated_token_file use_azure_cli "
        "skip_signature disable_tagging"
    ),
    others={
        **_COMMON,
        **_meanings("anon=skip_signature bearer_token=token endpoint_url=endpoint"),
        "connection_string": _connection_string,
        "credential": _credential,
        "sas_token": _sas_token,
    },
    prefixes=("azure_storage_", "azure_"),
)

BUCKET_OPTIONS = {
    **dict.fromkeys(("s3", "s3a"), S3_OPTIONS),
    **dict.fromkeys(("gs", "gcs"), GCS_OPTIONS),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE_OPTIONS),
}
"""By scheme."""
