"""Bytes: what a page is, the memory it lies in, its encoding and its checksums."""
