from . import state as state
from .buckets import Aspects as Aspects, AspectSettings as AspectSettings
from .buckets import BucketPlan as BucketPlan, BucketSettings as BucketSettings
from .buckets import BucketWalk as BucketWalk
from .buckets import bucket_settings as bucket_settings, cut_by_tokens as cut_by_tokens
from .buckets import least_tokens as least_tokens
from .job_order import stream_plan as stream_plan
from .job_order import JobOrder as JobOrder, PlanSettings as PlanSettings
from .job_order import bucket_plan as bucket_plan, make_plan as make_plan
from .job_order import order_fingerprint as order_fingerprint
from .job_order import first_settings as first_settings
from .placement import LaneChoice as LaneChoice, best_bins as best_bins
from .placement import choose_lane_order as choose_lane_order
from .lanes import LaneGroups as LaneGroups, LaneOrder as LaneOrder, MOST_GROUPS as MOST_GROUPS
from .lanes import Ints as Ints, ordered_slots as ordered_slots, partners as partners
from .listed_plan import ListSettings as ListSettings, ListedPlan as ListedPlan
from .mixture_plan import (
    MixturePlan as MixturePlan,
    MixtureSettings as MixtureSettings,
    late_parts_warning as late_parts_warning,
)
from .mixture_slots import SlotGroups as SlotGroups
from .needs import AHEAD_BYTES as AHEAD_BYTES, CONNECTIONS_MARGIN as CONNECTIONS_MARGIN
from .needs import DEMAND as DEMAND, LookAhead as LookAhead, MOST_AHEAD as MOST_AHEAD
from .needs import MOST_ROOM as MOST_ROOM, MOST_WIDENING as MOST_WIDENING, Needs as Needs
from .needs import Pace as Pace, check_room as check_room, connections as connections
from .needs import window_room_warning as window_room_warning, node_ranks as node_ranks
from .needs import open_windows_bytes as open_windows_bytes, room_for_fills as room_for_fills
from .needs import shards_of_ranks as shards_of_ranks, widening as widening
from .order import (
    DeliveredSample as DeliveredSample,
    Delivery as Delivery,
    JobPlan as JobPlan,
    LEAST_UNITS as LEAST_UNITS,
    MIXED_BATCHES as MIXED_BATCHES,
)
from .order import Plan as Plan, SlotSamples as SlotSamples, WINDOW_BYTES as WINDOW_BYTES
from .order import default_lanes as default_lanes, window_of as window_of
from .order import default_window as default_window, label_spread as label_spread
from .order import live_share as live_share, most_lanes as most_lanes, open_units as open_units
from .order import unit_count as unit_count
from .order_costs import better_batch as better_batch
from .order_costs import clustered_labels_warning as clustered_labels_warning
from .order_costs import readers_of as readers_of
from .order_costs import readers_per_shard as readers_per_shard
from .order_costs import shards_of_a_rank as shards_of_a_rank
from .order_costs import spread_warning as spread_warning, usual_spreads as usual_spreads
from .placement import ShardReaders as ShardReaders
from .placement import ProcessReport as ProcessReport, held_bytes_of_lanes as held_bytes_of_lanes
from .placement import nodes_of_reports as nodes_of_reports
from .job_order import PARTNERS_ELSEWHERE as PARTNERS_ELSEWHERE, RankOrder as RankOrder
from .job_order import RankSlots as RankSlots, most_elsewhere as most_elsewhere
from .job_order import with_partners as with_partners
from .state import LoaderState as LoaderState, MOST_LANE_ORDER as MOST_LANE_ORDER
from .state import damaged as damaged, not_a_torch_state as not_a_torch_state
from .state import part_of as part_of
from .substitutes import ATTEMPTS as ATTEMPTS, SAME_SHARD_ATTEMPTS as SAME_SHARD_ATTEMPTS
from .substitutes import substitutes as substitutes
from .weighted_plan import PartPlan as PartPlan, WeightSettings as WeightSettings
from .weighted_plan import WeightedPlan as WeightedPlan
from .walk import BatchSchedule as BatchSchedule, Cursor as Cursor, MOST_ENTRIES as MOST_ENTRIES
from .walk import MOST_KEPT as MOST_KEPT, Step as Step, Walk as Walk
from .world import World as World, first_slot as first_slot, launcher as launcher
from .world import local_rank as local_rank
from .world import peer_token as peer_token, pod_index as pod_index
from .world import process_group as process_group, rank_slots as rank_slots
