"""Benchmarks against the tools people would use instead: see README.md. Nothing here asserts a time."""
