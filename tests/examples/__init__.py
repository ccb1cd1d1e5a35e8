"""Tests of what the package bundles: example rows and the small tokenizer."""
