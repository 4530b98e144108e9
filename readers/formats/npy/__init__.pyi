from . import npy_fields as npy_fields
from . import npy_format as npy_format
