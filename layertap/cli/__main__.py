"""`python -m layertap.cli` is `layertap`."""

from layertap.cli import main

main()
