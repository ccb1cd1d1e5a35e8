"""Tests, by package."""

import os

# Set before numpy and torch are loaded, also in child processes: the tests already use all cores,
# and idle threads of these libraries would spin.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
