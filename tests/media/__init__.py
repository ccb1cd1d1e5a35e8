"""Tests of the media package."""
