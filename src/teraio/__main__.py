"""``python -m teraio``: the command ``teraio``, where its script is not on the path."""

from teraio.cli.group import main

main(prog_name="teraio")
