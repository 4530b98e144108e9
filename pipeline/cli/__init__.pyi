from . import doctor_command as doctor_command
from . import doctor_facts as doctor_facts
from . import doctor_peers as doctor_peers
from . import pack_command as pack_command
from .cache_command import ago as ago
from .command_options import parse_sampling as parse_sampling
from .inspect_batch import Picture as Picture, class_color as class_color
from .inspect_batch import contact_sheet as contact_sheet
from .doctor_checks import cache_checks as cache_checks, package_checks as package_checks
from .doctor_command import checks as checks
from .doctor_facts import CacheFacts as CacheFacts, FolderFacts as FolderFacts, Gpu as Gpu
from .doctor_facts import JobFacts as JobFacts, MachineFacts as MachineFacts
from .doctor_facts import ModuleFacts as ModuleFacts, Namesake as Namesake
from .doctor_facts import PackageFacts as PackageFacts, cache_facts as cache_facts
from .doctor_facts import file_system_kind as file_system_kind, folder_facts as folder_facts
from .doctor_facts import gather as gather, hiding as hiding, package_facts as package_facts
from .doctor_peers import peer_checks as peer_checks, peer_facts as peer_facts
from .doctor_store import RequestFailure as RequestFailure, StoreFacts as StoreFacts, probe as probe
from .doctor_store import store_checks as store_checks, store_facts as store_facts
from .examples import EXAMPLES as EXAMPLES
from .inspect_batch import load_batch as load_batch, displayed_pixels as displayed_pixels
from .inspect_batch import value_ranges as value_ranges
from .main import app as app, main as main
from .pack_command import executor_on as executor_on, index as index
from .plan_report import sweep as sweep
from .plan_inputs import model_named as model_named
