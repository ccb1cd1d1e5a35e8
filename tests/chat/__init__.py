"""Tests of the chat package."""
