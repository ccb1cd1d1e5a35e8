"""The data-consistency suite: does a trainer see exactly the data it should?

A lazy dataset was once merged and reverted within a day, because nobody could show that resuming
gives the same data. This package shows it, to be read from top to bottom; docs/resume.md explains
it.

    corpus.py          small stores whose rows are recognised by their content
    cases.py           every kind of stream: rows, packs, budgets, mixtures, orders, ends
    model.py           the eager reference: plain Python lists of what each must serve
    child.py           a trainer's process: opens the stores, loads a state, consumes, reports
    test_rows.py       every served row against the store and the eager reference
    test_resume.py     resume at every step, chains of resumes, crashes: in new processes
    test_geometry.py   ranks, prefetch, hash seeds and other environments
    test_workers.py    the number, start method and pinning of PyTorch workers
    test_machine.py    any sequence of next, save, load, set_epoch, new geometry and crash
    test_golden.py     streams of this release equal those of every earlier one
    test_sizes.py      states under 1 KB, pickles under 16 KiB
"""
