"""What grows with slices, and what does not."""
