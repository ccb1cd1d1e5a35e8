"""Programs around the project: each is run by its name, `python -m scripts.NAME`."""
