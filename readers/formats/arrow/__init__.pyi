from .ipc_chunks import tensor_of_json as tensor_of_json, torn_notes_error as torn_notes_error
from .ipc_chunks import units_of_json as units_of_json, units_to_json as units_to_json
