"""Load a tokenizer, identify it, and encode texts with proven masks."""
