"""Storage: files and formats that hold tensors, read and written a few rows at a time."""
