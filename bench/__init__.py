"""Benchmarks. `python -m bench` (`make bench`) compares strategies on hosts with shaped links."""
