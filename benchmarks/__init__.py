"""Benchmarks of ringcp. A case is an entry in `suite.py`, a provider of attention one in `providers.py`.

Each command writes into its folder under build/, or where `--out` says (`make bench ARGS="--out FOLDER"`). What is
committed is in benchmarks/results, written there by `--out benchmarks/results`; CSV files are appended to.

| command | writes |
|---|---|
| `make bench`, `benchmarks/bench.py` | build/bench: quick.csv or full.csv, and beside it -speed.png, -ranks.png and |
| | -steps-CASE.png, the last from -steps-CASE.json |
| `make bench-training`, `python -m benchmarks.training` | build/training: training.csv, training-speed.png; every |
| | step in training-curves.csv, drawn in training-curves.png |
| `make parity`, `python -m benchmarks.parity` | build/parity: parity.csv, parity.md, parity.png, written anew |
| `benchmarks/gpu_check.py` | build/gpu: gpu_check.json, written anew |
| `make bench-peers`, `python -m benchmarks.peers.bench` | build/peers: peers.csv |
| `benchmarks/attention.py` | build/attention: attention.csv; another file by `--csv` (modes.csv, cpu-2-ranks.csv) |

Beside each number stands where it comes from: `origin.py`.
"""
