from . import mapped_files as mapped_files
from .atomic import locked as locked, make_folder as make_folder, temp_name as temp_name
from .atomic import write_bytes as write_bytes, write_error as write_error, write_json as write_json
from .atomic import write_whole as write_whole
from .ipc import BYTE as BYTE, CONTINUES as CONTINUES, FlatTable as FlatTable
from .ipc import metadata_of as metadata_of
from .ipc import LazyColumn as LazyColumn, batch_head_end as batch_head_end
from .ipc import footer_start as footer_start, metadata as metadata, only_batch as only_batch
from .ipc import write_batch as write_batch
from .mapped_files import ADVISED_BATCHES as ADVISED_BATCHES, BROKEN as BROKEN
from .mapped_files import PageAdvice as PageAdvice, advise_willneed as advise_willneed
from .mapped_files import damaged_file_error as damaged_file_error
from .mapped_files import disk_reads as disk_reads, map_buffer as map_buffer
from .mapped_files import only_the_tail as only_the_tail, read_buffer as read_buffer
from .names import FIELDS_BY_KIND as FIELDS_BY_KIND, IMAGES as IMAGES
from .names import KINDS as KINDS, Kind as Kind
from .names import extension as extension, kind_of as kind_of, stem as stem
from .names import INDEX_SUFFIX as INDEX_SUFFIX, OWN_FOLDER as OWN_FOLDER, are_unsafe as are_unsafe
from .names import below as below, encoded_name as encoded_name, is_passed_over as is_passed_over
from .names import printable as printable, unsafe_reason as unsafe_reason
from .progress_reporter import ProgressReporter as ProgressReporter
from .yaml_text import parse_yaml as parse_yaml
