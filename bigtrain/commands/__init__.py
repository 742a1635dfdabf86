"""Subcommands of `bigtrain`, one module each.

The top layer: may import everything, and only `bigtrain.cli` imports it, one module per call. A
module imports torch and the like inside its `run`, so that `--help` is fast; its work is in
`bigtrain.python_api`, which Python calls too. Start with `registry`, which lists the commands,
then with the module that has the command's name: the fields of the dataclass that its `run` takes
are the command line (`bigtrain.system.arguments`); `arguments` has what several commands share.
"""
