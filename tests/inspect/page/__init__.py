"""Tests of the inspector: rows by origin and rule, the page on disk, the server, the browser."""
