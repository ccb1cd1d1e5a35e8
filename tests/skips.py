"""One line about all skipped tests, instead of one per place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable


def skip_line(reasons: Iterable[str]) -> str:
    """Return how many tests were skipped for each reason; an empty string if none was."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        reason = reason.removeprefix("Skipped: ").partition(", which")[0]
        missing = re.match(r"could not import '([\w.]+)'", reason)
        counts[f"needs {missing[1]}" if missing else reason] += 1
    if not counts:
        return ""
    listed = "; ".join(f"{count} {reason}" for reason, count in counts.most_common())
    return f"skipped {counts.total()} tests: {listed}"
