"""What a person wants to look at: rows with their mask, and totals over a store.

`RowView` is one row made readable: each token's bytes as text, whether it is trained, whether it is
a control token, and whether it closes a turn. `stats` counts a store. Both are plain values; the
command line and the page decide how they look.
"""

from __future__ import annotations
