from . import doctor_machine as doctor_machine
from . import doctor_network as doctor_network
from . import pack_command as pack_command
from .doctor_machine import CACHE as CACHE, FOLDER as FOLDER, MACHINE as MACHINE
from .doctor_machine import ModuleFacts as ModuleFacts, cache_facts as cache_facts
from .doctor_machine import folder_facts as folder_facts
from .doctor_machine import hiding as hiding
from .doctor_network import STORE as STORE, peer_facts as peer_facts
from .doctor_network import peer_findings as peer_findings, probe_store as probe_store
from .doctor_network import store_facts as store_facts
from .doctor_table import CheckTable as CheckTable, DoctorFacts as DoctorFacts, Finding as Finding
from .doctor_table import fail as fail
from .cache_command import ago as ago
from .command_options import DatasetOptions as DatasetOptions
from .inspect_batch import load_batch as load_batch
from .inspect_batch import value_ranges as value_ranges
from .main import EXAMPLES as EXAMPLES, app as app, main as main
from .pack_command import executor_on as executor_on, index as index
from .plan_report import sweep as sweep
from .plan_inputs import model_named as model_named
