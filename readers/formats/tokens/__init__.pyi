from . import token_format as token_format
from .token_format import read_idx as read_idx
from .token_sequences import Cut as Cut, document_parts as document_parts
from .token_sequences import first_fit as first_fit, cut_documents as cut_documents
from .token_sequences import pack_pieces as pack_pieces, sequence_count as sequence_count
from .token_sequences import slice_documents as slice_documents, stream_parts as stream_parts
