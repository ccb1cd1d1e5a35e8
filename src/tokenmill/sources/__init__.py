"""Find files, index rows, return the bytes and origin of any row or block."""
