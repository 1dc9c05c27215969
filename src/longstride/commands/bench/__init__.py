"""The benchmarks of `longstride bench`; results that are kept lie in benchmarks/results/ of the repository."""
