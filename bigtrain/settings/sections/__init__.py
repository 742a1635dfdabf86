"""The sections of the run YAML, one file a subject; `bigtrain.settings.run_config` puts them
together.

Each field has its type, default and description here and nowhere else. To add one, start in the
file of its subject; `base` has the types that sections share.
"""
