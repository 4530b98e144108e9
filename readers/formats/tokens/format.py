"""Files of token ids: flat ones, and Megatron's .bin with an .idx that tells their documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from penstock.cache.errors import CorruptShardError
from penstock.readers.formats.chunked import ChunkFormat

if TYPE_CHECKING:
    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.chunked import ChunkReader, ShardFacts
    from penstock.readers.formats.format import Indexing
    from penstock.readers.origin.origin import Origin


class TokenFormat(ChunkFormat):
    """Streams of token ids, cut into sequences."""

    name = "tokens"
    least_sample_bytes: ClassVar[int] = 0  # sequences may overlap

    @property
    def indexing(self) -> Indexing:
        """How a folder of such files gets its index."""
        from penstock.readers.formats.tokens.listing import TokenIndexing

        return TokenIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether there are Megatron's files at the root, or flat ones of which the user says what
        numbers they are; others don't say what they are."""
        found = origin.top(lambda name: name.endswith((b".bin", b".idx"))).entries
        if not found:
            return False
        from penstock.readers.formats.sampling import Sampling
        from penstock.readers.formats.tokens.megatron import has_magic

        idx = next((entry for entry in found if entry.name.endswith(b".idx")), None)
        if idx is None and origin.selection is not None:  # what lies beside a file that was named
            idx = origin.entry(found[0].name.removesuffix(b".bin") + b".idx")
        if idx is not None:
            return has_magic(origin, idx)
        return Sampling.of(origin.arrangement).dtype is not None

    def default_fields(self, schema: Schema) -> tuple[str, ...] | None:
        """The tokens alone; of packed documents all, as a sequence isn't one without."""
        from penstock.readers.fields.field_types import Array

        document = schema.get("document")
        is_packed = isinstance(document, Array) and document.dtype == "int32"
        return None if is_packed else ("tokens",)

    def open_chunks(self, shard: ShardFacts) -> ChunkReader:
        """Open a shard; reads none of its samples. Raises CorruptShardError."""
        from penstock.readers.formats.tokens.notes import TokenNotes
        from penstock.readers.formats.tokens.reading import token_reader

        try:
            return token_reader(TokenNotes.from_bytes(shard.notes), shard)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptShardError(
                f"A part of the index of tokens is damaged: {error}."
            ) from error


FORMAT = TokenFormat()
