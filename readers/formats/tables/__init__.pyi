from .column_fields import ArrowColumn as ArrowColumn, Tensor as Tensor
from .column_fields import columns_of as columns_of, tensor_of_json as tensor_of_json
from .column_fields import with_types_inside as with_types_inside
from .column_fields import without_dictionaries as without_dictionaries
from .column_values import inside_structs as inside_structs, values_table as values_table
from .table_files import StoredChunk as StoredChunk, TableFile as TableFile
from .table_files import TableFormat as TableFormat, TableReader as TableReader
from .table_files import arrow_errors as arrow_errors
from .table_files import max_decoded_bytes as max_decoded_bytes
from .column_fields import is_listed as is_listed
