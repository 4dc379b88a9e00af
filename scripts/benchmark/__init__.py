"""Benchmarks of the losses beside other implementations: `python -m scripts.benchmark --help`."""
