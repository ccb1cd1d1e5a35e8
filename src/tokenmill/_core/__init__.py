"""Shared basics: publishing files, remote reads, fingerprints, options, lazy imports."""
