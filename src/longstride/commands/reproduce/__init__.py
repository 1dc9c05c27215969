"""The experiments of docs/results.md, run again by `longstride reproduce`."""
