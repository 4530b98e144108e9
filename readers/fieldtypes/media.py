"""Encoded images, sound and video. `sniff` recognises them; a recipe decodes images with DALI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, explain_arguments
from penstock.readers.fieldtypes.field_type import FieldType
from penstock.readers.types import MAX_PIXELS, Facts, Rejection, accepted

if TYPE_CHECKING:
    from penstock.readers.types import Encoded


class _Media(FieldType):
    """Encoded media: its first bytes identify its format."""

    __slots__ = ()

    is_encoded: ClassVar[bool] = True
    can_return: ClassVar[bool] = False
    head_bytes: ClassVar[int] = 192

    def check_head(self, head: bytes) -> Rejection | None:
        from penstock.readers.fieldtypes.sniff import sniff_media

        found = sniff_media(self.kind, head)
        return found if isinstance(found, Rejection) else None

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Check the first bytes: nothing decodes sound and video yet. `examine` decodes images, all
        of a batch at once."""
        from penstock.readers.fieldtypes.sniff import sniff_media

        del field, max_pixels
        head = data[: self.head_bytes].tobytes()
        return Facts.of(data, codec=accepted(sniff_media(self.kind, head)))


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Image(_Media):
    """An encoded image (JPEG, PNG, …), which is decoded to upright pixels."""

    kind: ClassVar[str] = "image"
    has_sides: ClassVar[bool] = True
    is_image: ClassVar[bool] = True


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Audio(_Media):
    """An encoded piece of sound."""

    kind: ClassVar[str] = "audio"
    is_delivered: ClassVar[bool] = False


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Video(_Media):
    """An encoded video."""

    kind: ClassVar[str] = "video"
    is_delivered: ClassVar[bool] = False
