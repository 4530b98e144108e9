from . import peer_diagnosis as peer_diagnosis
from . import peer_link as peer_link
from . import peer_upstream as peer_upstream
from . import protocol as protocol
from . import server_process as server_process
from .answers import PeerRequest as PeerRequest, Responder as Responder
from .answers import crc_of_file as crc_of_file, noted_crc as noted_crc, read_head as read_head
from .peer_client import PeerClient as PeerClient
from .peer_client import PeerLimits as PeerLimits, PeerStore as PeerStore
from .peer_client import peer_ranges as peer_ranges
from .peer_diagnosis import PROTOCOL_NAMES as PROTOCOL_NAMES, PeerFacts as PeerFacts
from .peer_diagnosis import ProbeSettings as ProbeSettings
from .peer_diagnosis import fault_of as fault_of, probe as probe
from .peer_directory import Peer as Peer, PeerDirectory as PeerDirectory
from .peer_directory import PlannedReaders as PlannedReaders
from .peer_link import NodeRanks as NodeRanks, PeerExchange as PeerExchange, PeerLink as PeerLink
from .peer_upstream import PeerUpstream as PeerUpstream
from .protocol import MOST_HEAD_BYTES as MOST_HEAD_BYTES, RANGE_BYTES as RANGE_BYTES, Span as Span
from .protocol import date_text as date_text, stretches as stretches
from .server import (
    NodeServer as NodeServer,
    ServerLimits as ServerLimits,
    dispatch as dispatch,
    listen as listen,
)
from .server_process import PeerServer as PeerServer
from .answers import HeldFile as HeldFile, HeldFiles as HeldFiles
from .trust import MOST_LIFE_S as MOST_LIFE_S, PeerSecret as PeerSecret, Question as Question
from .trust import SECRET_VARIABLE as SECRET_VARIABLE, TOKEN_LIFE_S as TOKEN_LIFE_S
from .trust import authorize as authorize, check_token as check_token
from .trust import credentials_of as credentials_of, is_loopback as is_loopback
from .trust import job_secret as job_secret, make_credentials as make_credentials
from .trust import prove_server as prove_server, server_time as server_time
