from . import token_files as token_files
from . import token_listing as token_listing
from . import token_sequences as token_sequences
from .token_files import read_idx as read_idx
from .token_sequences import Cut as Cut, DocumentLengths as DocumentLengths
from .token_sequences import first_fit as first_fit, cut_documents as cut_documents
from .token_sequences import pack_pieces as pack_pieces, sequence_count as sequence_count
from .token_sequences import stream_parts as stream_parts
