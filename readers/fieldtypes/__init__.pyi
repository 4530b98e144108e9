from . import text_tables as text_tables, verification as verification
from .array_forms import ArrayForm as ArrayForm
from .array_forms import ARRAY_CODECS as ARRAY_CODECS, CODEC_ITEMSIZES as CODEC_ITEMSIZES
from .array_forms import MAX_HEAD_BYTES as MAX_HEAD_BYTES, NpyHeader as NpyHeader
from .array_forms import UNSUPPORTED_NPY as UNSUPPORTED_NPY, read_npy_header as read_npy_header
from .array_forms import unfit_numbers as unfit_numbers
from .array_forms import as_bits as as_bits, bare_facts as bare_facts
from .array_forms import codec_number as codec_number, decode_array as decode_array
from .array_forms import from_bits as from_bits
from .boxes import Boxes as Boxes, BoxUnits as BoxUnits, Keypoints as Keypoints
from .boxes import ImageSize as ImageSize, InstanceKeypoints as InstanceKeypoints
from .boxes import to_xyxy as to_xyxy
from .boxes import untyped_places as untyped_places
from .columns import ArrayColumn as ArrayColumn, Column as Column, ColumnCrop as ColumnCrop
from .columns import DenseColumn as DenseColumn
from .columns import EncodedColumn as EncodedColumn, ListColumn as ListColumn
from .columns import PartLoads as PartLoads
from .columns import RaggedColumn as RaggedColumn, SampleBatch as SampleBatch, cropped as cropped
from .columns import interleaved as interleaved, joined_batches as joined_batches
from .columns import joined_columns as joined_columns
from .columns import patched_column as patched_column, put_parts as put_parts
from .examine import check_related as check_related, check_files as check_files
from .examine import ValueChecks as ValueChecks, examine as examine
from .examine import verify_for as verify_for
from .field_type import DTYPES as DTYPES, FieldType as FieldType, Moves as Moves
from .field_type import ID as ID, NUMBER as NUMBER, PRESENT as PRESENT
from .field_type import FieldTypes as FieldTypes, MASK as MASK, SIZE as SIZE
from .field_type import check_field_name as check_field_name, check_field_type as check_field_type
from .field_type import from_json as from_json, is_field_name as is_field_name
from .field_type import is_number as is_number, named_type as named_type
from .field_type import number_name as number_name
from .instance_masks import InstanceMasks as InstanceMasks, Segmentations as Segmentations
from .mask_warps import warp_masks as warp_masks
from .masks import Mask as Mask, is_mask_name as is_mask_name
from .masks import common_dtype as common_dtype, masks_by_name as masks_by_name, nearest as nearest
from .decoded_sample import decoded_sample as decoded_sample
from .decoded_sample import fields_to_decode as fields_to_decode, image_of as image_of
from .media import eight_bits as eight_bits
from .media import Audio as Audio, Bytes as Bytes, Image as Image, Text as Text, Video as Video
from .media import Texts as Texts
from .number_types import Array as Array, ClassLabel as ClassLabel, ClassLabels as ClassLabels
from .number_types import MultiLabel as MultiLabel, Tokens as Tokens, Value as Value
from .schema import LABEL as LABEL, LABELS as LABELS, MAX_FIELDS as MAX_FIELDS, Naming as Naming
from .schema import PLAIN as PLAIN, Schema as Schema, Settling as Settling
from .schema import base_name as base_name
from .schema import check_names as check_names, check_renames as check_renames
from .schema import check_selection as check_selection, class_field as class_field
from .schema import default_fields as default_fields
from .schema import image_fields as image_fields, not_chosen as not_chosen
from .schema import renamed_field as renamed_field, stored_fields as stored_fields
from .verification import IMAGE_HEAD_BYTES as IMAGE_HEAD_BYTES
from .verification import check_jpeg as check_jpeg, is_progressive as is_progressive
from .verification import open_with_plugin as open_with_plugin
from .verification import sniff as sniff, upright_sizes as upright_sizes
from .text_tables import TableFields as TableFields
from .text_tables import column_of as column_of, fields_of as fields_of
from .text_tables import MAX_TABLE_BYTES as MAX_TABLE_BYTES, TextTable as TextTable
from .text_tables import csv_table as csv_table, json_object as json_object
from .text_tables import json_value as json_value, jsonl_table as jsonl_table
from .text_tables import strict_json as strict_json
from .text_tables import object_table as object_table
from .verification import check_images as check_images, named_verify as named_verify
from .verification import strict_pillow as strict_pillow, verify_name as verify_name
