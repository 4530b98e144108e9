from .shares import ShareTree as ShareTree, integer_shares as integer_shares
from .stream import EpochRule as EpochRule
from .stream import MixtureStream as MixtureStream, WeightChange as WeightChange
from .stream import Weights as Weights, epoch_samples as epoch_samples
from .weights import Transition as Transition, WeightsArgument as WeightsArgument
from .weights import WeightScale as WeightScale
