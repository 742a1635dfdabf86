"""Subcommands of `bigtrain`, one module each; see `bigtrain.cli`."""
