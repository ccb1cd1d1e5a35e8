"""What a person wants to look at: rows with their mask, totals over a store, what is wrong.

In go stores (or, for lint and the doctor, what is to be prepared); out come plain values: a row
made readable (`row`), totals and distributions (`stats`), findings (`lint`), the state of the
machine (`doctor`), and a page to look at in a browser (`page`). The command line calls all of them
and decides how they look.
"""

from __future__ import annotations
