from .column_choice import FieldChoice as FieldChoice
from .column_choice import features_in_metadata as features_in_metadata, refusal_of as refusal_of
from .column_types import ArrowColumn as ArrowColumn, PATHS_ALONE as PATHS_ALONE, Tensor as Tensor
from .column_types import arrow_columns as arrow_columns
from .column_types import without_dictionaries as without_dictionaries
from .column_values import EncodedRows as EncodedRows, values_of as values_of
from .column_values import values_table as values_table
from .table_files import MAX_CHECKED_BYTES as MAX_CHECKED_BYTES, TableFormat as TableFormat
from .table_files import TableMetadata as TableMetadata, check_claim as check_claim
from .table_files import cut_units as cut_units, max_decoded_bytes as max_decoded_bytes
from .table_files import refused_file_error as refused_file_error
from .unit_reader import NO_CHUNK as NO_CHUNK, ShardUnits as ShardUnits, UnitReader as UnitReader
from .unit_reader import corrupt_notes_error as corrupt_notes_error
from .unit_reader import tensor_of_json as tensor_of_json
