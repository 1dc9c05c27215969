"""Measurements that `longstride bench` makes; results that are kept lie in benchmarks/results/ of the repository."""
