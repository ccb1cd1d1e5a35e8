"""The answers of the reference systems, through the public door: `tokenmill.prepare`."""
