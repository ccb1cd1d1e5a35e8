"""Tests of the checks of `make conformance`; its runs need checkouts and are no tests."""
