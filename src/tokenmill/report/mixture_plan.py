"""What a mixture will serve, before anything runs.

Comes in: a `Mixture` and a number of samples. Goes out: the planned share of every source over all
of them and over each of a few stretches, for ``tokenmill mix``. The counts are the very ones that
`tokenmill.Loader` serves, a function of the position: nothing is drawn or read, so a billion
samples are planned as quickly as ten.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tokenmill.dataset import Mixture

STRETCHES = 20  # lines of the drawing


def mixture_plan(mixture: Mixture, steps: int, batch_size: int) -> dict[str, Any]:
    """Planned shares of rows, over all steps and over stretches of them.

    Args:
        mixture: Sources, weights and schedules.
        steps: How many steps are planned.
        batch_size: Samples of a step, over all ranks.
    """
    grouped = mixture.view.has_groups  # a sample is then a group, as for `tokenmill.Loader`
    schedule = mixture.schedule(grouped)
    ends = sorted({steps * part // STRETCHES for part in range(STRETCHES + 1)})
    counts = [schedule.served(*divmod(end * batch_size, schedule.rows)) for end in ends]
    stretches = [
        {
            "first_step": first,
            "stop_step": stop,
            "shares": _shares(mixture, [b - a for a, b in zip(before, behind, strict=True)]),
        }
        for (first, stop), (before, behind) in zip(pairwise(ends), pairwise(counts), strict=True)
    ]
    rows = dict(zip(mixture.names, counts[-1], strict=True))
    return {
        "shares": _shares(mixture, counts[-1]),
        "rows": rows,
        "passes": {
            name: round(rows[name] / size, 6)
            for name, size in zip(mixture.names, mixture.sizes(grouped), strict=True)
        },
        "steps": steps,
        "batch_size": batch_size,
        "samples": steps * batch_size,
        "stretches": stretches,
    }


def _shares(mixture: Mixture, counts: list[int]) -> dict[str, float]:
    total = sum(counts)
    return {
        name: round(count / total, 6) for name, count in zip(mixture.names, counts, strict=True)
    }
