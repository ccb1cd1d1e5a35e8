"""Tests of the room of recorded rollouts."""
