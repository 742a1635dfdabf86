"""The DeepSpeed JSON: its keys, who owns each, how it is rendered. deepspeed is not imported.

Imports the rest of `settings`; any layer may import it. Start with `engine_config`, which renders
the JSON of a run. `ownership` says which keys the run YAML owns, `keys` checks names and values of
all keys (`keys.json`, written by tools/deepspeed_keys.py).
"""
