"""Tests of the loader."""
