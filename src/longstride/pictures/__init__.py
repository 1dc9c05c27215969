"""Pictures: patterns, learned attention, runs, benchmarks.

May import every room but commands.
"""
