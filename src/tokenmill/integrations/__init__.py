"""Adapters to training frameworks, Hugging Face `datasets` and Ray; one module per library."""
