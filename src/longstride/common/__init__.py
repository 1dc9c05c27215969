"""Tools that know nothing of attention: files, argument validation, device, console, figure style.

Imports no other room.
"""
