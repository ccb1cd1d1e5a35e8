"""Tests of `tokenmill.store`."""
