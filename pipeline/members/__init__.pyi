from . import lane_agreement as lane_agreement
from .comparison import SharedFacts as SharedFacts, recipe_facts as recipe_facts
from .comparison import recipe_text as recipe_text
from .job_membership import ENDING_TIMEOUT_S as ENDING_TIMEOUT_S, JobMembership as JobMembership
from .job_membership import join_ranks as join_ranks, post_refusal as post_refusal
from .job_membership import refuse_unbuilt as refuse_unbuilt, rejoin_ranks as rejoin_ranks
from .lane_agreement import agreed_lane_order as agreed_lane_order
from .membership import Membership as Membership, rank_failure as rank_failure
