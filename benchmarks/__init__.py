"""Benchmarks: every published figure, measured next to its peer in the same run.

`python -m benchmarks [section …]` runs the modules of this package (``rows``, ``chat``, …). Each
has ``run(report)`` and reports ratios against the peer, bounds, and shares of time per stage.
Shared machines are noisy, so compare only figures of the same run.
"""
