"""The commands. Importing this package declares them."""

from tokenmill.cli.commands import build, inspect, sources, stats, stores  # noqa: F401
