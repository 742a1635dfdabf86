"""The sections of the run YAML, one model each; `bigtrain.config` puts them together."""
