"""The parts of `gpu_check.py`. A further part is a function of a `Bench` and an entry in `plan.py`."""
