"""Find files, index their rows, and read any row or block with its origin."""
