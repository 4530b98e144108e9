"""What users say of how a dataset lies (`fields=`, `manifest=`, `schema=`), as one value."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import (
    FIELD_TYPES,
    FieldType,
    check_field_name,
    from_json,
    to_json,
)
from penstock.readers.formats.sampling import AS_THEY_COME, Sampling
from penstock.readers.origin.absent import status_of
from penstock.readers.origin.arrangement import NO_TABLE, Arrangement
from penstock.readers.origin.urls import local_path, show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.urls import Url

ManifestFile = str | os.PathLike[str] | Literal[False]
"""A table of samples: a name below the dataset's root, or a path of this machine; False is none,
not even one that lies there."""


def arrangement_of(
    url: Url,
    *,
    manifest: ManifestFile | None = None,
    fields: Iterable[str] | Mapping[str, str | None] | None = None,
    schema: Mapping[str, FieldType] | None = None,
    filesystem: Any | None = None,
    sampling: Sampling = AS_THEY_COME,
    allow_empty: bool = False,
    max_pixels: int | None = None,
) -> Arrangement:
    """The arrangement that arguments of a dataset say. Raises ConfigError."""
    if type(allow_empty) is not bool:
        raise ConfigError(f"allow_empty: got {allow_empty!r}, wanted True or False.")
    if max_pixels is not None and (type(max_pixels) is not int or max_pixels < 1):
        raise ConfigError(
            f"max_pixels: got {max_pixels!r}, wanted the pixels of the largest image, such as "
            "200_000_000."
        )
    return Arrangement(
        manifest=_manifest(url, manifest, is_path=filesystem is not None),
        places=_places(fields),
        schema=_schema(schema),
        sampling=sampling.to_json(),
        allow_empty=allow_empty,
        max_pixels=max_pixels,
    )


def given_types(arrangement: Arrangement) -> dict[str, FieldType]:
    """The types of fields that the user gave."""
    told = json.loads(arrangement.schema) if arrangement.schema else []
    return {
        each["name"]: from_json({k: v for k, v in each.items() if k != "name"}) for each in told
    }


def are_names(format: str, origin: Origin) -> bool:
    """Whether the places of fields are names that the fields have without a word, as nothing lies
    at any of them. format: of the data; tables, arrays and stores have columns and paths there."""
    places = [place for _, place in origin.arrangement.places]
    if format == "tokens":
        return True
    if format == "tar":
        return all(place in MEMBER_NAMES for place in places)
    if format != "folder" or origin.arrangement.manifest or origin.selection is not None:
        return False
    folders = {os.fsdecode(name) for name in origin.names().folders}
    tops = [place.removeprefix("./").partition("/")[0] for place in places]
    return not any("*" in place for place in places) and folders.isdisjoint(tops)


MEMBER_NAMES = frozenset(("image", "audio", "video", "caption", "array", "label"))
"""What the members of a tar file are called as fields, where they have no name of their own."""


def renamed_arrangement(arrangement: Arrangement, names: Mapping[str, str]) -> Arrangement:
    """What a user says of data whose fields get other names, as of the data as they lie. names: of
    fields, each with that which the data have."""
    types = json.loads(arrangement.schema) if arrangement.schema else []
    for each in types:
        each["name"] = names.get(each["name"], each["name"])
        if each.get("of") is not None:
            each["of"] = names.get(each["of"], each["of"])
    return replace(arrangement, places=(), schema=json.dumps(types) if types else "")


def _schema(schema: Mapping[str, Any] | None) -> str:
    if not schema:
        return ""
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f'schema: got {schema!r}, wanted types by field, such as {{"boxes": '
            'Boxes(of="image")}.'
        )
    for name, type in schema.items():
        check_field_name(name, what="schema")
        if not isinstance(type, tuple(FIELD_TYPES.values())):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, wanted a field type such as Image() or '
                'Array("float32", (3,)).'
            )
    return json.dumps([{"name": name, **to_json(type)} for name, type in schema.items()])


def _places(
    fields: Iterable[str] | Mapping[str, str | None] | None,
) -> tuple[tuple[str, str], ...]:
    """Where fields lie; none where names alone are told."""
    if not isinstance(fields, Mapping):
        return ()
    places = {name: place for name, place in fields.items() if place is not None}
    for name, place in places.items():
        check_field_name(name, what="fields")
        if not isinstance(place, str):
            raise ConfigError(
                f'fields["{name}"]: got {place!r}, wanted a folder such as "images", a pattern '
                'such as "masks/*_mask.png", or a column of the manifest.'
            )
    return tuple(places.items())


def _manifest(url: Url, manifest: ManifestFile | None, *, is_path: bool) -> str | None:
    if manifest is None:
        return None
    if manifest is False:
        return NO_TABLE
    told = os.fspath(manifest) if isinstance(manifest, str | os.PathLike) else None
    if not isinstance(told, str) or not told or "\0" in told:
        raise ConfigError(
            f"manifest: got {manifest!r}, wanted a table such as list.csv or list.jsonl, or False."
        )
    if isinstance(url, list | tuple):
        raise ConfigError(
            f"manifest: a table lists the files of a folder, and a list of {len(url):,} files is "
            "given. Leave one out."
        )
    path = local_path(told)
    if path is None:
        root = str(url).rstrip("/") + "/"
        if is_path or not told.startswith(root):
            raise ConfigError(
                f"manifest: got {show(told)}, wanted a name below {show(url)}, or a path of this "
                "machine: fetch it from there."
            )
        return told[len(root) :]
    named = os.fsdecode(path)
    root_path = None if is_path else local_path(url)
    if os.path.isabs(named):
        return _below(named, root_path)
    if root_path is None:
        is_here = not isinstance(manifest, str) or named.startswith(("./", "../"))
        return os.path.abspath(named) if is_here else os.path.normpath(named)
    inside, here = os.path.join(os.fsdecode(root_path), named), os.path.abspath(named)
    there = [each for each in (inside, here) if status_of(each) is not None]
    if len(there) == 2 and not os.path.samefile(*there):
        raise ConfigError(
            f"manifest: got {named!r}, and both {inside} and {here} are there. Give an absolute "
            "path."
        )
    if not there:
        raise ConfigError(f"manifest: got {named!r}, and neither {inside} nor {here} is there.")
    return _below(os.path.abspath(there[0]), root_path)


def _below(path: str, root: bytes | None) -> str:
    """A name below a local dataset's root where the path is one, so that it goes with the data."""
    if root is None:
        return path
    inside = os.path.abspath(os.fsdecode(root)).rstrip("/") + "/"
    return path[len(inside) :] if path.startswith(inside) else path
