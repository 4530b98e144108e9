"""Describe how the files of a dataset make up samples, as far as the user says so.

The same files in another arrangement are another dataset, with an index of its own. Field types
are defined in a higher package, so a schema is JSON here.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace

from penstock.cache import ConfigError

MAX_MANIFEST_BYTES = 2**30
"""As large a local table is read."""


NO_TABLE = ""
"""In a manifest's place: tables that lie there aren't read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the files of a dataset make up samples, as far as a user says so.

    manifest: a table of samples: a name below the dataset's root, or an absolute local path; None
    is what lies there, NO_TABLE nothing of that. places: fields and where each lies (folders,
    patterns or a table's columns), in order. schema: types of some fields, as `Schema.to_json`
    writes them in JSON; "" is none. sampling: what of arrays is one sample, as `Sampling.to_json`
    writes it; "" where nothing is said. allow_empty: a class folder without samples keeps its
    class number. max_pixels: of an image or a mask; None is the default.
    """

    manifest: str | None = None
    places: tuple[tuple[str, str], ...] = ()
    schema: str = ""
    sampling: str = ""
    allow_empty: bool = False
    max_pixels: int | None = None

    @property
    def key(self) -> str:
        """Names this arrangement among those of one dataset: 16 hex digits, "" for what lies
        there."""
        if self == AS_IT_LIES:
            return ""
        said: list[object] = [self.manifest, self.places, self.schema, self.sampling]
        if self.allow_empty or self.max_pixels is not None:  # else the keys of earlier versions
            said += [self.allow_empty, self.max_pixels]
        told = json.dumps(said)
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def key_with_content(self) -> str:
        """As `key`, with the bytes of a local table in place of its path: for remote data, whose
        index may be used elsewhere, and is kept without asking each time whether it is still true.
        Raises ConfigError."""
        path = self.local_manifest()
        if path is None:
            return self.key
        try:
            if os.path.getsize(path) > MAX_MANIFEST_BYTES:
                raise ConfigError(
                    f"manifest: {self.manifest} is larger than {MAX_MANIFEST_BYTES:,} bytes. Split "
                    "the dataset, or pack it."
                )
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(
                f"manifest: {self.manifest} can't be read ({error.strerror})."
            ) from error
        return replace(self, manifest=content).key

    def local_manifest(self) -> str | None:
        """The manifest's path on this machine; None where it lies below the dataset's root."""
        is_path = self.manifest is not None and os.path.isabs(self.manifest)
        return self.manifest if is_path else None


AS_IT_LIES = Arrangement()
"""Nothing is said: files make up samples by their names."""
