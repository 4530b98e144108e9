"""Encoded images, sound and video. A recipe decodes images with DALI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.cache import ConfigError, explain_arguments
from penstock.readers.fieldtypes.field_type import FieldType
from penstock.readers.fieldtypes.texts import Bytes
from penstock.readers.types import Rejection


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Image(FieldType):
    """An encoded image (JPEG, PNG, …), which is decoded to upright pixels. `examine` checks all
    images of a batch at once."""

    kind: ClassVar[str] = "image"
    is_encoded: ClassVar[bool] = True
    has_sides: ClassVar[bool] = True
    is_image: ClassVar[bool] = True
    can_return: ClassVar[bool] = False
    head_bytes: ClassVar[int] = 64

    def check_head(self, head: bytes) -> Rejection | None:
        from penstock.readers.fieldtypes.sniff import sniff

        found = sniff(head)
        return found if isinstance(found, Rejection) else None


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Audio(Bytes):
    """An encoded piece of sound, which nothing decodes or checks yet."""

    kind: ClassVar[str] = "audio"
    can_return: ClassVar[bool] = False
    is_delivered: ClassVar[bool] = False


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Video(Bytes):
    """An encoded video, which nothing decodes or checks yet."""

    kind: ClassVar[str] = "video"
    can_return: ClassVar[bool] = False
    is_delivered: ClassVar[bool] = False
