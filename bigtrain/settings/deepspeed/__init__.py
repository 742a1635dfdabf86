"""The DeepSpeed JSON: its keys, who owns each, how it is rendered. Text only: deepspeed is not
imported.

Start with `engine_config`, which makes the JSON of a run. `ownership` says which keys bigtrain sets
itself, `keys` knows every key there is (`keys.json`, written by tools/deepspeed_keys.py).
"""
