"""Serve rows: views, mixtures, order, packing, the loader, and RL prompts."""
