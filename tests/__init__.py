"""Tests, by room."""
