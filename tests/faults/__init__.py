"""Faults: what tokenmill promises, tried by killing, failing and damaging what it stands on.

`world` makes small sources and compares caches; `zygote` is a process that has everything imported
and forks a fresh one per command, so that hundreds of faults fit into a minute; `shim.c` lets the
n-th system call of such a process fail; `tools` finds strace, gcc and namespaces, or skips by name.
"""
