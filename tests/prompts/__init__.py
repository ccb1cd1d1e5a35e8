"""Tests of the prompts room: golden answers, an eager reference, faults of the length index."""
