"""What trainers' own preparation makes of the same conversations, judged by words planted in them.

`make conformance HOSTS=DIR` runs it: `hosts` has one driver per trainer, each run in a process of
its own on the trainer's unmodified code; `conversations` plants the words, `reference` asks
transformers what the model itself would print, `judge` compares, `page` writes
``docs/conformance.md``. Ours is one driver among the others.
"""
