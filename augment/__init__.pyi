from . import decode_failures as decode_failures
from . import devices as devices
from . import graph as graph
from . import graph_definition as graph_definition
from . import image_checks as image_checks
from . import resample_operator as resample_operator
from .array_crops import ArrayCrop as ArrayCrop, ArrayDraws as ArrayDraws
from .array_crops import check_array_crops as check_array_crops, cropped_schema as cropped_schema
from .array_crops import is_array_crop as is_array_crop
from .checked_recipes import FieldRecipes as FieldRecipes
from .dali_library import load_dali as load_dali
from .decode_failures import failing_rows as failing_rows, fault_of as fault_of
from .decode_failures import reason_of as reason_of
from .devices import WindowDecoding as WindowDecoding, WindowTrial as WindowTrial
from .devices import try_window_decoding as try_window_decoding, usable_decoding as usable_decoding
from .devices import window_decoding as window_decoding
from .draw_keys import entry_salts as entry_salts
from .draws import DRAW_RULES as DRAW_RULES, Draws as Draws
from .draws import RESIZED_CROP_ATTEMPTS as RESIZED_CROP_ATTEMPTS
from .draws import argument_inputs as argument_inputs, argument_values as argument_values
from .draws import decodes_window as decodes_window, draw as draw
from .draws import draw_with_moves as draw_with_moves, input_names as input_names
from .draws import place_windows as place_windows
from .field_operations import CheckedMaps as CheckedMaps, Map as Map, Pad as Pad
from .field_operations import PlacedMap as PlacedMap, SanitizeBoxes as SanitizeBoxes
from .field_operations import Unpack as Unpack, check_maps as check_maps, split_maps as split_maps
from .field_recipes import FieldLists as FieldLists
from .field_recipes import Recipes as Recipes, by_field as by_field, check_recipes as check_recipes
from .graph import DaliPipeline as DaliPipeline, DecodedBatch as DecodedBatch, Graph as Graph
from .graph import SMALL_RUN_BATCHES as SMALL_RUN_BATCHES, SMALL_RUN_SAMPLES as SMALL_RUN_SAMPLES
from .graph import SubBatchSizer as SubBatchSizer, select_rows as select_rows
from .graph_definition import GraphPlan as GraphPlan, OPERATION_NODES as OPERATION_NODES
from .graph_definition import decode_options as decode_options, define_outputs as define_outputs
from .image_checks import WHITE as WHITE, bad_headers as bad_headers, is_jpeg2000 as is_jpeg2000
from .image_checks import jpeg2000_refusal as jpeg2000_refusal, read_header as read_header
from .image_checks import warn_of_dark as warn_of_dark
from .image_followers import CropMove as CropMove, FlipMove as FlipMove, ImageMoves as ImageMoves
from .image_followers import OUTSIDE as OUTSIDE, ScaleMove as ScaleMove, follow as follow
from .image_followers import index_maps as index_maps, move_boxes as move_boxes
from .image_followers import move_masks as move_masks, move_points as move_points
from .mixing import MIX_DRAWS as MIX_DRAWS, Mix as Mix, Mixer as Mixer
from .mixing import mix_in_kernels as mix_in_kernels, class_count as class_count
from .mixing import cutmix_boxes as cutmix_boxes, draw_mix as draw_mix, mix_images as mix_images
from .mixing import mixer_of as mixer_of, soft_targets as soft_targets
from .mixing import symmetric_beta as symmetric_beta
from .operations import Apply as Apply, AutoAugment as AutoAugment, CIFAR_MEAN as CIFAR_MEAN
from .operations import CIFAR_STD as CIFAR_STD, Cast as Cast, CenterCrop as CenterCrop
from .operations import ColorJitter as ColorJitter, CutMix as CutMix, Decode as Decode
from .operations import FieldOperation as FieldOperation, GaussianBlur as GaussianBlur
from .operations import GeometricOperation as GeometricOperation, IMAGENET_MEAN as IMAGENET_MEAN
from .operations import IMAGENET_STD as IMAGENET_STD, MixUp as MixUp
from .operations import MixingOperation as MixingOperation, Normalize as Normalize
from .operations import Operation as Operation, RandAugment as RandAugment, RandomCrop as RandomCrop
from .operations import RandomErasing as RandomErasing, RandomGrayscale as RandomGrayscale
from .operations import RandomHorizontalFlip as RandomHorizontalFlip
from .operations import RandomResizedCrop as RandomResizedCrop, RandomRotation as RandomRotation
from .operations import RandomVerticalFlip as RandomVerticalFlip, Resize as Resize
from .operations import TrivialAugmentWide as TrivialAugmentWide, cifar_train as cifar_train
from .operations import imagenet_eval as imagenet_eval, imagenet_train as imagenet_train
from .policies import KINDS as KINDS, Policy as Policy, PolicyChoice as PolicyChoice
from .policies import bin_count as bin_count, choose as choose, learnt_pairs as learnt_pairs
from .policies import operation_space as operation_space, policy_draws as policy_draws
from .policies import policy_inputs as policy_inputs, rotation as rotation
from .policies import round_count as round_count, tabulate as tabulate
from .recipe import CheckedRecipe as CheckedRecipe, FLIP_INVARIANT as FLIP_INVARIANT
from .recipe import ImageShape as ImageShape, PIXEL_OPERATIONS as PIXEL_OPERATIONS
from .recipe import PlacedOperation as PlacedOperation, check_recipe as check_recipe
from .recipe import needs_colours as needs_colours, short_side as short_side
from .resident_decoder import FullImageDecoder as FullImageDecoder, HELD_RUNS as HELD_RUNS
from .resident_decoder import RUNS_IN_FLIGHT as RUNS_IN_FLIGHT, RUN_PIXELS as RUN_PIXELS
from .resident_decoder import RUN_SAMPLES as RUN_SAMPLES, decode_runs as decode_runs
from .resident_decoder import resident_tensor as resident_tensor
from .verify import ImageVerifier as ImageVerifier, verify_images as verify_images
