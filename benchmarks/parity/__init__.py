"""Whether results are those of one process: `python -m benchmarks.parity`."""
