from . import field_types as field_types
from . import text_tables as text_tables, verification as verification
from .array_forms import ARRAY_CODECS as ARRAY_CODECS, ArrayForm as ArrayForm
from .array_forms import CODEC_ITEMSIZES as CODEC_ITEMSIZES, array_form as array_form
from .array_forms import as_bits as as_bits, bare_facts as bare_facts, codec_number as codec_number
from .array_forms import decode_array as decode_array, decode_text as decode_text
from .array_forms import from_bits as from_bits, has_sides as has_sides
from .array_forms import number_dtype as number_dtype, to_array as to_array
from .boxes import BoxChecks as BoxChecks, BoxUnits as BoxUnits, check_boxes as check_boxes
from .boxes import to_xyxy as to_xyxy
from .columns import Column as Column, ColumnCrop as ColumnCrop, DenseColumn as DenseColumn
from .columns import EncodedColumn as EncodedColumn, ListColumn as ListColumn
from .columns import RaggedColumn as RaggedColumn, SampleBatch as SampleBatch, cropped as cropped
from .columns import joined_batches as joined_batches, joined_columns as joined_columns
from .columns import put_parts as put_parts, samples_of as samples_of
from .examine import Checked as Checked, check_masks as check_masks, check_noted as check_noted
from .examine import examine as examine, verify_for as verify_for
from .field_types import Array as Array, Audio as Audio, Boxes as Boxes, Bytes as Bytes
from .field_types import ClassLabel as ClassLabel, FIELD_TYPES as FIELD_TYPES
from .field_types import FieldType as FieldType, ID as ID, Image as Image, Keypoints as Keypoints
from .field_types import Mask as Mask, MultiLabel as MultiLabel, NUMBER as NUMBER
from .field_types import PRESENT as PRESENT, Text as Text, Tokens as Tokens, Value as Value
from .field_types import Video as Video, DTYPES as DTYPES, check_field_name as check_field_name
from .field_types import from_json as from_json, has_values as has_values, is_encoded as is_encoded
from .field_types import is_field_name as is_field_name, is_number as is_number
from .field_types import number_name as number_name, to_json as to_json
from .fit import Settling as Settling, may_not_fit as may_not_fit, mismatch as mismatch
from .fit import put_fitting as put_fitting, unfit_numbers as unfit_numbers
from .masks import (
    decode_mask as decode_mask,
    mask_codec as mask_codec,
    mask_dtype as mask_dtype,
    narrow as narrow,
)
from .fit import is_mask_name as is_mask_name, masks_by_name as masks_by_name
from .fit import untyped_places as untyped_places
from .npy_header import MAX_HEAD_BYTES as MAX_HEAD_BYTES, NpyHeader as NpyHeader
from .npy_header import UNSUPPORTED_NPY as UNSUPPORTED_NPY, read_npy_header as read_npy_header
from .schema import LABEL as LABEL, LABELS as LABELS, MAX_FIELDS as MAX_FIELDS, Naming as Naming
from .schema import PLAIN as PLAIN, Schema as Schema, base_name as base_name
from .schema import check_names as check_names, check_renames as check_renames
from .schema import check_selection as check_selection, class_field as class_field
from .schema import default_fields as default_fields, deliverable_fields as deliverable_fields
from .schema import image_fields as image_fields, not_chosen as not_chosen
from .schema import renamed_field as renamed_field, stored_fields as stored_fields
from .sniff import HEAD_BYTES as HEAD_BYTES, IMAGE_HEAD_BYTES as IMAGE_HEAD_BYTES
from .sniff import check_jpeg as check_jpeg, has_head as has_head, is_progressive as is_progressive
from .sniff import refusal_by_head as refusal_by_head, sniff as sniff
from .sniff import upright_sizes as upright_sizes
from .table_fields import COLUMN_TYPES as COLUMN_TYPES, TableFields as TableFields
from .table_fields import fields_of as fields_of
from .text_tables import MAX_TABLE_BYTES as MAX_TABLE_BYTES, TextTable as TextTable
from .text_tables import csv_table as csv_table, json_object as json_object
from .text_tables import json_value as json_value, jsonl_table as jsonl_table
from .text_tables import object_table as object_table
from .text_tables import valid_object_table as valid_object_table
from .verification import find_verify as find_verify, image_verdicts as image_verdicts
from .verification import named_verify as named_verify, strict_pillow as strict_pillow
from .verification import verify_name as verify_name
