"""The step loop, its process and the client that the API talks to."""

import os

OPENMP_SPIN_COUNT = "10000"

# Here, because it must be set before anything below imports torch: libgomp reads it once, when torch is loaded. Its default,
# to spin for milliseconds where threads wait for each other, costs most of the throughput as soon as anything else wants
# the cores, and the API process always does. A process that the API process spawns inherits it.
os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
