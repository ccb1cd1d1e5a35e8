"""Find what is wrong with rows before anything is trained on them.

`run.lint` sends blocks of rows to an executor. Workers (`linter`) render and encode them as a
build would and apply `checks`; duplicates are found from digests and sketches (`minhash`).
"""
