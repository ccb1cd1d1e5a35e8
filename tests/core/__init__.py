"""Tests of `tokenmill._core`."""
