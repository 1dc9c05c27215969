"""Tools without knowledge of attention: files, argument validation, device, console, figure style.

Imports nothing of ours.
"""
