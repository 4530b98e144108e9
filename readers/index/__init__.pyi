from . import shared_build as shared_build
from .building import IndexBuilder as IndexBuilder, PriorFacts as PriorFacts
from .building import join_manifest as join_manifest, label_correlation as label_correlation
from .building import sidecar_name as sidecar_name
from .candidate_reading import CandidateBatch as CandidateBatch, check_units as check_units
from .candidate_reading import cut_into_batches as cut_into_batches
from .candidate_reading import read_candidate_batches as read_candidate_batches
from .dataset_address import DatasetAddress as DatasetAddress, check_indexes as check_indexes
from .dataset_address import pickle_with as pickle_with, selected_candidates as selected_candidates
from .executor_indexing import CheckedShard as CheckedShard
from .index import Index as Index, IndexShards as IndexShards
from .index_folders import Folder as Folder
from .manifest import Manifest as Manifest, SIDECARS as SIDECARS, check_manifest as check_manifest
from .manifest import check_summary as check_summary, is_sidecar_name as is_sidecar_name
from .manifest_file import COLUMNS as COLUMNS, MANIFEST as MANIFEST, read_manifest as read_manifest
from .manifest_file import write_manifest as write_manifest
from .opening import IndexOpener as IndexOpener, locate_fields as locate_fields
