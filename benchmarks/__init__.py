"""Benchmarks of ringcp. `bench.py` runs suites of named cases, `attention.py` any other case; a case is an entry in
`suite.py`, a provider one in `providers.py`.
"""
