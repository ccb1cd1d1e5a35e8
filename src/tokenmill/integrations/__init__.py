"""Adapters to training frameworks, Hugging Face `datasets` and Ray.

Each module adapts to one library and imports it; they share `trainers` and do not import each
other. Import them by name: ``from tokenmill.integrations import torch``.
"""
