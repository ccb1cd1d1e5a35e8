"""Tests of the tokenizers package."""
