"""storage_options of gs: gcsfs's names and obstore's own."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.stores.options import COMMON, read_options, words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.options import StoreOptions

_NAMES = words(
    "service_account service_account_path service_account_key base_url bearer_token "
    "application_credentials skip_signature"
)
_ALIASES = {"anon": "skip_signature", "endpoint_url": "base_url", "endpoint": "base_url"}


def _token(found: StoreOptions, value: Any) -> None:
    """gcsfs: a method's name, a file of credentials, their contents, or an access token."""
    if value in (None, "google_default", "cloud", "cache"):
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
            f"their contents as a dictionary, or an access token; got {type(value).__name__}. "
            "For other ways to log in pass a gcsfs file system object."
        )


_SPECIAL = {**COMMON, "token": _token}


def gcs_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read gcsfs's options or obstore's with or without "google_". Raises ConfigError."""
    return read_options("gs", options, _NAMES, _ALIASES, _SPECIAL, strip="google_")
