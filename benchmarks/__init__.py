"""Benchmarks: suites of cases, ours and peers; one runner; ``python -m benchmarks --help``."""
