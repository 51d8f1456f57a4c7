"""Benchmarks of ringcp. `attention.py` is the runner; a provider is one entry in `providers.py`."""
