from . import shared_build as shared_build
from .building import IndexBuilder as IndexBuilder, complete_index as complete_index
from .building import sidecar_name as sidecar_name
from .candidate_checks import check_units as check_units, cut_into_batches as cut_into_batches
from .candidate_checks import read_candidate_batches as read_candidate_batches
from .candidate_checks import results_of_json as results_of_json
from .candidate_checks import results_to_json as results_to_json
from .dataset_description import BuildOptions as BuildOptions, Folder as Folder
from .dataset_description import DatasetDescription as DatasetDescription
from .index import Index as Index
from .index_folders import IndexPlaces as IndexPlaces
from .manifest import COLUMNS as COLUMNS, DatasetSummary as DatasetSummary
from .manifest import MANIFEST as MANIFEST, Manifest as Manifest
from .manifest import SIDECARS as SIDECARS, check_manifest as check_manifest
from .manifest import label_correlation as label_correlation
from .manifest import check_summary as check_summary, is_sidecar_name as is_sidecar_name
from .manifest import read_manifest as read_manifest, write_manifest as write_manifest
from .opening import IndexOpener as IndexOpener
