"""Tests, by room."""

import os

# Before numpy and torch are loaded, here and in every child: threads that wait for small work spin,
# and the processes of one test run share the cores as it is.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
