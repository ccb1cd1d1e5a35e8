"""Tests of the store room: format, reading, refusing."""
