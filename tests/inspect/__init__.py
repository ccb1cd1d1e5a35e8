"""Tests of what a person looks at: lint, statistics, the doctor, the page."""
