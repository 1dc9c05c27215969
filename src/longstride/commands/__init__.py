"""The verbs of the command line: each wires the other rooms together.

May import every room.
"""
