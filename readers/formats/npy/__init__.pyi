from . import npy_format as npy_format
from . import npy_pieces as npy_pieces
from . import stored_arrays as stored_arrays
