"""`python -m longstride` is the command line."""

from longstride.commands.main import main

main()
