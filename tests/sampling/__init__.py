"""Tests of the orders."""
