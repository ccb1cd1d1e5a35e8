"""Tests of the room that finds, indexes and reads rows."""
