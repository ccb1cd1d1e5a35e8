"""Every figure we state, measured beside the peer in one run.

`python -m benchmarks [room …]` runs the modules of this package (``rows``, ``chat``, …). Each has
``run(report)`` and reports through `benchmarks.report.Report`: ratios against the peer, floors
that the issue states, shares of time per stage. The machine is shared and noisy, so only ratios
of the same run mean anything.
"""
