from .arrangement import (
    DEFAULT_ARRANGEMENT as DEFAULT_ARRANGEMENT,
    Arrangement as Arrangement,
    NO_TABLE as NO_TABLE,
)
from .dataset_place import described_folder as described_folder
from .dataset_place import index_url as index_url, options_scope as options_scope
from .dataset_place import place_of as place_of
from .file_selection import of_names as of_names
from .left_out import LeftOut as LeftOut, QUARANTINE as QUARANTINE
from .left_out import QuarantineEntry as QuarantineEntry
from .left_out import count_left_out as count_left_out, joined_left_out as joined_left_out
from .left_out import left_out_for as left_out_for, left_out_lines as left_out_lines
from .left_out import left_out_total as left_out_total
from .left_out import no_good_sample_message as no_good_sample_message, percent as percent
from .left_out import quarantine_lines as quarantine_lines
from .locating import locate as locate
from .origin import Entry as Entry, LocalFolder as LocalFolder, Origin as Origin
from .remote_folder import RemoteFolder as RemoteFolder
from .scratch import Scratch as Scratch
from .unreadable import check_layout as check_layout
from .unreadable import check_splits as check_splits, check_store as check_store
from .unreadable import field_of as field_of, may_be_image as may_be_image
from .unreadable import is_prose as is_prose, not_a_folder_message as not_a_folder_message
from .unreadable import not_found_message as not_found_message, role_of as role_of
from .unreadable import unread_files as unread_files
from .origin import Url as Url, check_url as check_url
from .origin import NOT_FOUND as NOT_FOUND, local_path as local_path, show as show
from .origin import cannot_examine as cannot_examine, status_of as status_of
