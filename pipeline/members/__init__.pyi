from . import lane_agreement as lane_agreement
from .handshake import FirstBatchBarrier as FirstBatchBarrier, SharedFacts as SharedFacts
from .handshake import check_replicas as check_replicas, check_same_plan as check_same_plan
from .handshake import format_ranks as format_ranks, recipe_facts as recipe_facts
from .handshake import recipe_text as recipe_text
from .job_waits import JobWaits as JobWaits
from .lane_agreement import agreed_lane_order as agreed_lane_order, exchange as exchange
from .lane_agreement import held_of_groups as held_of_groups
from .joining import join_ranks as join_ranks, refuse_unbuilt as refuse_unbuilt
from .joining import rejoin_ranks as rejoin_ranks
from .rank_membership import LoaderChannel as LoaderChannel, RankMembership as RankMembership
from .shared_channel import ENDING_TIMEOUT_S as ENDING_TIMEOUT_S, SharedChannel as SharedChannel
from .shared_channel import open_channel as open_channel, publish_count as publish_count
from .shared_channel import published_counts as published_counts
