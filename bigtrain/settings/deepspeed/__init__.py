"""DeepSpeed JSON: its keys, their owners, and its rendering. deepspeed is not imported.

Imports the rest of `settings`; any layer may import it. Start with `engine_config`, which renders
the JSON of a run. `ownership` lists the keys that the run YAML owns, `keys` checks names and values
of all keys (`keys.json`, written by tools/deepspeed_keys.py).
"""
