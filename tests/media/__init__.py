"""Tests of the media room."""
