"""`python -m longstride` is the command line."""

from longstride.cli import main

main()
