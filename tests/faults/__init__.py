"""Faults: kill, fail and damage what tokenmill stands on, and compare with a clean build."""
