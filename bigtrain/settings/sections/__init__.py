"""The sections of the run YAML, one file per subject; `bigtrain.settings.run_config` combines them.

Each field has its type, default and description here and nowhere else. Imports pydantic only;
everything else reads the sections through `run_config`. To add a field, start in the file of its
subject; `base` has the types that sections share.
"""
