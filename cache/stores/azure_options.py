"""storage_options of az: adlfs's names and obstore's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.stores.options import COMMON, read_options, words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.options import StoreOptions

_NAMES = words(
    "account_name account_key client_id client_secret credential_type tenant_id authority_host "
    "authority_id sas_key sas_token token bearer_token use_emulator use_fabric_endpoint endpoint "
    "msi_endpoint object_id msi_resource_id federated_token_file use_azure_cli skip_signature "
    "disable_tagging"
)
_ALIASES = {
    "anon": "skip_signature",
    "sas_token": "sas_key",
    "bearer_token": "token",
    "endpoint_url": "endpoint",
}
_CONNECTION_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def _connection_string(found: StoreOptions, value: Any) -> None:
    pairs = (part.partition("=") for part in str(value or "").split(";"))
    for name, _, inner in pairs:
        if (known := _CONNECTION_STRING.get(name.strip().lower())) and inner:
            found.config[known] = inner


def _credential(found: StoreOptions, value: Any) -> None:
    """adlfs: an account key, or a SAS token."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError(
            "storage_options: credential: wanted an account key or a SAS token as text, got "
            f"{type(value).__name__}. Use client_id, client_secret and tenant_id, or pass an "
            "adlfs file system object."
        )
    is_sas = value.startswith("?") or "sig=" in value
    found.config["sas_key" if is_sas else "account_key"] = value.removeprefix("?")


def _sas_token(found: StoreOptions, value: Any) -> None:
    if value is not None:
        found.config["sas_key"] = str(value).removeprefix("?")


_SPECIAL = {
    **COMMON,
    "connection_string": _connection_string,
    "credential": _credential,
    "sas_token": _sas_token,
}


def azure_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read adlfs's options or obstore's with or without "azure_". Raises ConfigError."""
    return read_options("az", options, _NAMES, _ALIASES, _SPECIAL, strip="azure_storage_")
