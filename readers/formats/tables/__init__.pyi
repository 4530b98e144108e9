from .column_choice import FieldChoice as FieldChoice, SchemaDrift as SchemaDrift
from .column_choice import choose_columns as choose_columns
from .column_choice import features_in_metadata as features_in_metadata, kind_of as kind_of
from .column_choice import may_be_paths as may_be_paths, no_field_error as no_field_error
from .column_choice import refusal_of as refusal_of, warn_of_left_out as warn_of_left_out
from .column_choice import warn_of_partitions as warn_of_partitions, warn_of_paths as warn_of_paths
from .column_types import ArrowColumn as ArrowColumn, PATHS_ALONE as PATHS_ALONE, Tensor as Tensor
from .column_types import arrow_columns as arrow_columns
from .column_types import without_dictionaries as without_dictionaries
from .column_values import EncodedRows as EncodedRows, values_of as values_of
from .column_values import values_table as values_table
from .table_files import FileUnits as FileUnits, TableListing as TableListing
from .table_files import are_tables as are_tables, check_claim as check_claim
from .table_files import cut_units as cut_units
from .unit_reader import NOT_THERE as NOT_THERE, ShardUnits as ShardUnits, UnitReader as UnitReader
