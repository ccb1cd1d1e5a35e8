"""Tests of the integrations with trainers."""
