from .folder_listing import MAX_TIMED_FILES as MAX_TIMED_FILES
from .folder_listing import manifest_entry as manifest_entry, read_whole as read_whole
from .folder_listing import with_masks as with_masks
from .folder_format import FolderFormat as FolderFormat, list_folder as list_folder
from .listed_samples import ListedTable as ListedTable, listed_samples as listed_samples
from .listed_samples import manifest_table as manifest_table, metadata_table as metadata_table
from .named_samples import LARGEST_JSON_BYTES as LARGEST_JSON_BYTES
from .named_samples import class_folder_samples as class_folder_samples
from .named_samples import paired_samples as paired_samples, parse_field_place as parse_field_place
