"""Find problems in rows before training.

`run.lint` sends blocks of rows to an executor. Workers (`linter`) render and encode them like a
build and apply `checks`. Duplicates are found from digests and sketches (`minhash`).
"""
