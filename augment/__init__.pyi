from . import dali_nodes as dali_nodes
from . import dali_runs as dali_runs
from . import graph as graph
from . import verify as verify
from .argument_checks import argument as argument, boolean as boolean, only as only
from .argument_checks import optional as optional
from .argument_checks import fill_value as fill_value, numbers as numbers, one_of as one_of
from .argument_checks import probability as probability, range_around as range_around
from .argument_checks import whole_number as whole_number
from .checked_recipes import ArrayCrop as ArrayCrop, ArrayDraws as ArrayDraws
from .field_recipes import check_array_crops as check_array_crops
from .field_recipes import cropped_schema as cropped_schema
from .field_recipes import is_array_crop as is_array_crop
from .checked_recipes import FieldRecipes as FieldRecipes
from .dali_runs import EncodedPipeline as EncodedPipeline
from .dali_runs import RUN_PIXELS as RUN_PIXELS, RUN_SAMPLES as RUN_SAMPLES
from .dali_runs import decode_runs as decode_runs, load_dali as load_dali
from .dali_nodes import if_else as if_else, warp as warp
from .dali_runs import failing_rows as failing_rows, fault_of as fault_of
from .dali_runs import reason_of as reason_of
from .draw_keys import Uniform as Uniform, entry_salts as entry_salts
from .draw_keys import keyed_uniform as keyed_uniform, view_salts as view_salts
from .draws import Draws as Draws, draw as draw, draw_with_moves as draw_with_moves
from .draws import input_kinds as input_kinds
from .field_operations import ColumnOperation as ColumnOperation
from .field_operations import Map as Map, PackTokens as PackTokens, Pad as Pad
from .field_operations import PlacedMap as PlacedMap
from .field_operations import InstanceIds as InstanceIds
from .field_operations import SanitizeBoxes as SanitizeBoxes, Unpack as Unpack
from .field_operations import check_maps as check_maps, split_maps as split_maps
from .field_recipes import FieldLists as FieldLists
from .field_recipes import Recipes as Recipes, by_field as by_field, check_recipes as check_recipes
from .geometric_operations import CenterCrop as CenterCrop, FixedCrop as FixedCrop
from .geometric_operations import Letterbox as Letterbox, LongestSide as LongestSide
from .geometric_operations import RandomIoUCrop as RandomIoUCrop, ScaleJitter as ScaleJitter
from .geometric_operations import RESIZED_CROP_ATTEMPTS as RESIZED_CROP_ATTEMPTS
from .geometric_operations import RandomCrop as RandomCrop
from .geometric_operations import RandomHorizontalFlip as RandomHorizontalFlip
from .geometric_operations import RandomResizedCrop as RandomResizedCrop
from .geometric_operations import RandomVerticalFlip as RandomVerticalFlip, Resize as Resize
from .graph import DaliPipeline as DaliPipeline, DecodedBatch as DecodedBatch, Graph as Graph
from .graph import ImageList as ImageList, Images as Images, ViewTensors as ViewTensors
from .graph import FullImageDecoder as FullImageDecoder, HELD_RUNS as HELD_RUNS
from .graph import resident_tensor as resident_tensor, RUNS_IN_FLIGHT as RUNS_IN_FLIGHT
from .graph import SMALL_RUN_BATCHES as SMALL_RUN_BATCHES, SMALL_RUN_SAMPLES as SMALL_RUN_SAMPLES
from .graph import select_rows as select_rows
from .graph_definition import GraphPlan as GraphPlan
from .graph_definition import decode_options as decode_options, define_outputs as define_outputs
from .image_moves import CropMove as CropMove, FlipMove as FlipMove, ImageMoves as ImageMoves
from .image_moves import OUTSIDE as OUTSIDE, ScaleMove as ScaleMove
from .image_moves import WarpMove as WarpMove
from .mixing import CutMix as CutMix, Mix as Mix, MixUp as MixUp
from .mixing import MixingOperation as MixingOperation
from .mixing import mix_in_kernels as mix_in_kernels, class_count as class_count
from .mixing import cutmix_boxes as cutmix_boxes, draw_mix as draw_mix, mix_images as mix_images
from .mixing import soft_targets as soft_targets
from .mixing import symmetric_beta as symmetric_beta
from .operation import FieldOperation as FieldOperation
from .operation import GeometricOperation as GeometricOperation
from .operation import ImageOperation as ImageOperation, ImageShape as ImageShape
from .operation import Operation as Operation, Stage as Stage
from .operation import checked_operations as checked_operations
from .pixel_operations import Apply as Apply, Cast as Cast, ColorJitter as ColorJitter
from .pixel_operations import Decode as Decode, GaussianBlur as GaussianBlur
from .pixel_operations import IMAGENET_MEAN as IMAGENET_MEAN, IMAGENET_STD as IMAGENET_STD
from .pixel_operations import Normalize as Normalize, RandomAutocontrast as RandomAutocontrast
from .pixel_operations import RandomEqualize as RandomEqualize, RandomErasing as RandomErasing
from .pixel_operations import RandomGrayscale as RandomGrayscale
from .pixel_operations import RandomPosterize as RandomPosterize, Solarize as Solarize
from .policies import AutoAugment as AutoAugment, KINDS as KINDS, Policy as Policy
from .policies import RandAugment as RandAugment, strengths as strengths
from .policies import TrivialAugmentWide as TrivialAugmentWide, learnt_pairs as learnt_pairs
from .recipe import CIFAR_MEAN as CIFAR_MEAN, CIFAR_STD as CIFAR_STD
from .recipe import ViewField as ViewField
from .recipe import CheckedRecipe as CheckedRecipe, check_recipe as check_recipe
from .recipe import cifar_train as cifar_train, imagenet_eval as imagenet_eval
from .recipe import imagenet_train as imagenet_train
from .views import Views as Views, check_views as check_views
from .verify import bad_headers as bad_headers, is_jpeg2000 as is_jpeg2000
from .verify import pillow_refusal as pillow_refusal, read_header as read_header
from .verify import verify_images as verify_images
from .pixel_operations import RandomAffine as RandomAffine, RandomPerspective as RandomPerspective
from .pixel_operations import RandomRotation as RandomRotation, rotation as rotation
