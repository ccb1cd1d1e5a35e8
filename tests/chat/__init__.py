"""Tests of the chat room."""
