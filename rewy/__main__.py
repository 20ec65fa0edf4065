"""`python -m rewy` is `rewy`."""

from rewy.cli import main

main()
