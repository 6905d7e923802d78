"""``python -m teraio.cli``."""

from teraio.cli.group import main

main(prog_name="teraio")
