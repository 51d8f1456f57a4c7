"""Other libraries, from their released packages, as providers of the benchmark: `make bench-peers`.

Nothing of theirs is here: `adapters.py` calls them, and `standin/` has what they import and a CPU does not.
"""
