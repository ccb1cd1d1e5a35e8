"""Tests of the adapters to host frameworks."""
