"""The `rltt` command. Each command imports what it needs when it runs, so that `rltt --help` answers at once."""
