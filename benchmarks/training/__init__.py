"""What context parallelism costs and gives in training: `python -m benchmarks.training`."""
