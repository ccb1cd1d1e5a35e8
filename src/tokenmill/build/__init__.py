"""From a recipe to a store: plan the slices, run them on an executor, commit.

A *recipe* is the frozen description of a preparation; its fields, the tokenizer's identity and the
bytes of a slice are that slice's key. The *plan* walks the source's content-cut blocks and names
the slice that each will become; those that are already published are not built again. An
*executor* decides only where the missing ones run. When all are there, the store is committed.
"""
