"""Sources and stores elsewhere: over HTTP, on S3, in fsspec's memory, on the hub."""
