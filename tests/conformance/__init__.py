"""Tests of the judge of `make conformance`; its runs need checkouts and are no tests."""
