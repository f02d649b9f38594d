"""`python -m r4090c` is the command line."""

from r4090c.cli import program

program()
