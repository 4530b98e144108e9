from .accelerators import ACCELERATORS as ACCELERATORS, Accelerator as Accelerator
from .accelerators import accelerator as accelerator
from .bench_report import as_json as as_json, machine as machine, show_result as show_result
from .bench_report import versions as versions
from .ceilings import measure_ceilings as measure_ceilings, rate_in_sequence as rate_in_sequence
from .ceilings import without_augmenting as without_augmenting
from .child_process import Child as Child, ChildFailedError as ChildFailedError, HOME as HOME
from .child_process import MARK as MARK, send_to_parent as send_to_parent
from .loader_comparison import LoaderComparison as LoaderComparison, LoaderFigures as LoaderFigures
from .loader_comparison import (
    compare_loaders as compare_loaders,
    crop_of as crop_of,
    export_files as export_files,
)
from .measurement import BenchResult as BenchResult, DatasetFacts as DatasetFacts
from .measurement import reopened as reopened, bench as bench
from .measured_run import Figure as Figure, MeasuredRun as MeasuredRun, RunFigures as RunFigures
from .measured_run import SETTLE_BATCHES as SETTLE_BATCHES, floor_au as floor_au, play as play
from .measured_run import Clock as Clock, StepTimes as StepTimes, endless as endless
from .measured_run import samples_of as samples_of, tree_cpu_s as tree_cpu_s
from .bench_report import bars_of as bars_of, check_plot as check_plot, figure_type as figure_type
from .bench_report import plot as plot, style_axes as style_axes
from .workload import LoaderSettings as LoaderSettings
from .workload import AUTO as AUTO, NamedRecipe as NamedRecipe, recipe_named as recipe_named
from .rounds import ACCELERATOR_SHARE as ACCELERATOR_SHARE, Comparison as Comparison
from .rounds import NotTheSameWorkError as NotTheSameWorkError, Player as Player, Round as Round
from .rounds import RoundSize as RoundSize, TensorFacts as TensorFacts
from .rounds import check_same_work as check_same_work, compare as compare
from .rounds import differences as differences
from .rounds import fitted_size as fitted_size, look as look, summarise as summarise
from .measurement import disk_rate as disk_rate, probe as probe
from .measurement import Axis as Axis, MOST_NOISE as MOST_NOISE
from .measurement import SearchResult as SearchResult, axes_for as axes_for
from .measurement import tune as tune
from .workload import Workload as Workload, step_of as step_of
