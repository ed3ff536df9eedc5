"""Rows to train on: files, formats, the cache of tokens."""
