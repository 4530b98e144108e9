from . import zarr_format as zarr_format
from .zarr_codecs import ZarrPython as ZarrPython
from .zarr_codecs import decoder_of as decoder_of, lzma_decompressor as lzma_decompressor
from .zarr_metadata import ArrayMetadata as ArrayMetadata, MAX_DOCUMENT_BYTES as MAX_DOCUMENT_BYTES
from .zarr_metadata import Node as Node, Sharding as Sharding
from .zarr_metadata import consolidated_nodes as consolidated_nodes, data_type as data_type
from .zarr_metadata import fill_value as fill_value, parse_array as parse_array
from .zarr_metadata import read_document as read_document, read_node as read_node
