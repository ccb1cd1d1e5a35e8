"""How much memory is a process's own: resident pages less those shared with files and others.

Workers report it with every result, so that a build can show that memory does not grow with the
number of rows (promise P12 speaks of private pages; those of mapped files come and go).
"""

from __future__ import annotations

import os


def private_bytes() -> int | None:
    """This process's private memory in bytes, or None where the system does not tell.

    From ``statm``, which costs microseconds; ``smaps_rollup`` would be exact and cost milliseconds
    with a large map. Pages of mapped files are not counted (promise P12 speaks of private ones).
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
