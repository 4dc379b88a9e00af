"""Benchmarks of the losses against other implementations: `python -m scripts.benchmark --help`."""
