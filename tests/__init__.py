"""Tests of Penstock."""

import os

# Before anything imports torch or numpy: the threads of their operations spin while they wait for
# one another, and several processes of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
