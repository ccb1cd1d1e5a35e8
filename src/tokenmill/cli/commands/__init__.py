"""The commands. Importing this package declares them.

A command imports what it calls inside the function, so that ``--help`` stays quick.
"""

from tokenmill.cli.commands import build, inspect, sources, stats, stores  # noqa: F401
