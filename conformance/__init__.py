"""Compare what trainers' own code makes of the same conversations.

`make conformance TRAINERS=DIR` runs it. `trainers` has one driver per trainer, each run in its own
process on unmodified code; tokenmill is one of them. `conversations` inserts unique words,
`reference` renders with transformers, `checks` compares, and `page` writes
``docs/internals/conformance.md``.
"""
