from . import blocks as blocks, sample_weights as sample_weights
from .blocks import Blocks as Blocks, MAX_FREE as MAX_FREE
from .concatenation import concat as concat
from .dataset import Dataset as Dataset, check_left_out as check_left_out
from .dataset import contents_of as contents_of
from .epoch_lists import EpochList as EpochList, EpochLists as EpochLists
from .fieldtypes.columns import SampleBatch as SampleBatch
from .index.index import Index as Index
from .index.opening import IndexSummary as IndexSummary, build_index as build_index
from .index.opening import open_index as open_index
from .map_mixture import MapMixture as MapMixture, index_contents as index_contents
from .mixture import Mixture as Mixture, PART as PART, mix as mix
from .mixture_file import is_mixture_file as is_mixture_file, mix_file as mix_file
from .mixture_file import open_source as open_source
from .mixture_summary import fixed_tokens as fixed_tokens
from .mixture_summary import MixtureSummary as MixtureSummary, PartSummary as PartSummary
from .packing.packing import PackSummary as PackSummary, pack as pack
from .pictures import Picture as Picture, Reading as Reading, Scaling as Scaling
from .pictures import class_color as class_color, contact_sheet as contact_sheet
from .pictures import displayed_pixels as displayed_pixels, pictures_of as pictures_of
from .pictures import spread as spread, table_html as table_html
from .remote_shards import RemoteJobs as RemoteJobs, RemoteShards as RemoteShards
from .sample_weights import SampleSlots as SampleSlots, SampleWeights as SampleWeights
from .sample_weights import WeightsOfSamples as WeightsOfSamples
from .sample_weights import checked_weights as checked_weights
from .serialized_source import SerializedSource as SerializedSource
from .sources import (
    Contents as Contents,
    MixtureContents as MixtureContents,
    ReadOptions as ReadOptions,
    Run as Run,
    Selection as Selection,
    Source as Source,
    View as View,
    listed as listed,
    reweighted as reweighted,
    weighted as weighted,
)
from .types import ANY_SIZE as ANY_SIZE, Bools as Bools, Floats as Floats, Ints as Ints
from .types import Numbers as Numbers
from .types import Encoded as Encoded, EncodedBatch as EncodedBatch
from .types import Facts as Facts, ImageFacts as ImageFacts, ImageRange as ImageRange
from .types import MAX_PIXELS as MAX_PIXELS, Rejection as Rejection, array_codec as array_codec
from .types import pixel_refusal as pixel_refusal
