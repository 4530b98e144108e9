"""What a field's first bytes tell, before the rest is read: what can't be one isn't read whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.fields import media, sniff
from penstock.readers.fields.field_types import Audio, Image, Video
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from penstock.readers.fields.field_types import FieldType

HEAD_BYTES = max(sniff.HEAD_BYTES, media.HEAD_BYTES)
"""As many first bytes as `refusal_by_head` looks at."""


def has_head(type: FieldType) -> bool:
    """Whether first bytes tell anything of a type."""
    return isinstance(type, Image | Audio | Video)


def refusal_by_head(type: FieldType, head: bytes) -> Rejection | None:
    """Why bytes that begin so can't be a sample of a type, or None. head: HEAD_BYTES of them, or
    all."""
    found: str | Rejection | None = None
    if isinstance(type, Image):
        found = sniff.sniff(head)
    elif isinstance(type, Audio):
        found = media.sniff_audio(head)
    elif isinstance(type, Video):
        found = media.sniff_video(head)
    return found if isinstance(found, Rejection) else None
