from . import npy_format as npy_format
from . import stored_arrays as stored_arrays
