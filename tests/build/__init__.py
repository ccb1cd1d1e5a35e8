"""Tests of `tokenmill.build`."""
