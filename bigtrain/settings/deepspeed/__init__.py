"""DeepSpeed JSON: keys, owners of keys, and rendering. deepspeed is not imported.

Imports other modules of `settings`; any layer may import it. Start with `engine_config`, which
renders the JSON of a run. `ownership` lists the keys that the run YAML owns, `keys` checks names
and values of all keys (`keys.json`, written by tools/deepspeed_keys.py).
"""
