"""`python -m rltt`: the `rltt` command, for launchers that start a module."""

from rltt.cli.main import app

app()
