"""Tests of remote sources and stores: HTTP, S3, fsspec's memory, the hub."""
