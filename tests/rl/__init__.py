"""Tests of the package of recorded rollouts."""
