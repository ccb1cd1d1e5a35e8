"""Tests of the tokenizer room."""
