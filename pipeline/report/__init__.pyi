from . import probes as probes
from .bad_sample_file import QuarantineFile as QuarantineFile
from .diagnosis import Diagnosis as Diagnosis, ceiling_of as ceiling_of, diagnose as diagnose
from .docstring_texts import texts_of as texts_of
from .job_statistics import JobStatistics as JobStatistics, MOST_TEXT as MOST_TEXT
from .job_statistics import RankWaits as RankWaits, WAITS_OF_STATISTICS as WAITS_OF_STATISTICS
from .meter import Meter as Meter
from .metrics import field_names as field_names, log_tensorboard as log_tensorboard
from .metrics import serve_metrics as serve_metrics
from .part_counts import PartMeter as PartMeter, PartStatistics as PartStatistics
from .probes import ReadProbe as ReadProbe, core_speeds as core_speeds
from .run_facts import Cause as Cause, Ceilings as Ceilings, ChunkFacts as ChunkFacts
from .run_facts import CoreSpeeds as CoreSpeeds, ImageFigures as ImageFigures, Limit as Limit
from .run_facts import LoaderFacts as LoaderFacts, MapFacts as MapFacts
from .run_facts import ProgressiveCost as ProgressiveCost, Rate as Rate
from .run_facts import PartFacts as PartFacts
from .run_facts import ResidentFacts as ResidentFacts, ShardFigures as ShardFigures
from .run_facts import TierFacts as TierFacts
from .statistics import Statistics as Statistics
