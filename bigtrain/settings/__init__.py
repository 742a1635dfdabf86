"""Configuration of a run: the run YAML, parallel degrees, batch plan, DeepSpeed JSON.

Pure: pydantic and yaml, no torch, so that `bigtrain check` answers at once. Imports `system` only;
every layer above may import it. Start with `resolve`, which turns files and overrides into a
`ResolvedRun`; `run_config` and `sections` have the fields, `compatibility` the rules about which
settings cannot be combined, `deepspeed` the JSON for DeepSpeed.
"""
