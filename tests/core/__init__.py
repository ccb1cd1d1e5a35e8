"""Tests of the only writer of files."""
