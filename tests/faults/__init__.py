"""Fault injection: kill, fail and damage, and compare with a clean build."""
