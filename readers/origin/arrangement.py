"""Describe how the files of a dataset make up samples, as far as the user's arguments define it.

The same files in another arrangement are another dataset, with an index of its own. Types of fields
and `Sampling` are defined in other packages; here they are values with a JSON form.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_TABLE = ""
"""A value of `Arrangement.manifest`: the tables in the dataset's folder aren't read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The user's arguments on how the files of a dataset make up samples.

    manifest: a table of samples, as a name relative to the dataset's root or an absolute local
    path. None reads the tables in the folder, NO_TABLE none of them. places: fields and the place
    of each (folders, patterns or a table's columns), in order. schema: the types of some fields.
    sampling: a `Sampling`, the part of an array that is one sample; None is the default.
    allow_empty: True if a class folder without samples keeps its class number. max_pixels: of an
    image or a mask; None is the default. split: the part of a dataset whose files name its parts;
    None is the default.
    """

    manifest: str | None = None
    places: tuple[tuple[str, str], ...] = ()
    schema: Mapping[str, Any] = field(default_factory=dict)
    sampling: Any = None
    allow_empty: bool = False
    max_pixels: int | None = None
    split: str | None = None

    @property
    def key(self) -> str:
        """Return 16 hex digits that identify this arrangement of a dataset, "" for the default."""
        if self == DEFAULT_ARRANGEMENT:
            return ""
        # The JSON in JSON keeps the keys of earlier versions.
        types = [{"name": name, **type.to_json()} for name, type in self.schema.items()]
        schema = json.dumps(types) if types else ""
        sampling = "" if self.sampling is None else self.sampling.to_json()
        values: list[object] = [self.manifest, self.places, schema, sampling]
        if self.allow_empty or self.max_pixels is not None:
            values += [self.allow_empty, self.max_pixels]
        if self.split is not None:
            values.append({"split": self.split})
        return hashlib.sha256(json.dumps(values).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def renamed(self, names: Mapping[str, str]) -> Arrangement:
        """Return this arrangement for the data's own names of the fields. names: of each renamed
        field."""
        schema = {names.get(name, name): type.renamed(names) for name, type in self.schema.items()}
        return replace(self, places=(), schema=schema)

    def key_with_content(self) -> str:
        """Return `key` with the content of a local table in place of its path. This is for remote
        data: another machine may use the index, and nobody checks it at each opening. Raises
        ConfigError if the table can't be read."""
        path = self.local_manifest()
        if path is None:
            return self.key
        try:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(
                f"manifest: {self.manifest} can't be read ({error.strerror})."
            ) from error
        return replace(self, manifest=content).key

    def local_manifest(self) -> str | None:
        """Return the local path of the table, or None if it lies below the dataset's root."""
        is_path = self.manifest is not None and os.path.isabs(self.manifest)
        return self.manifest if is_path else None


DEFAULT_ARRANGEMENT = Arrangement()
"""The default: the names of the files define the samples."""
