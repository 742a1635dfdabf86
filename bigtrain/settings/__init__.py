"""What a run is before anything starts: the run YAML, degrees, batch plan, DeepSpeed JSON.

Pure: pydantic and yaml, no torch, so that `bigtrain check` answers at once. Imports `system` only;
everything above may import it. Start with `resolve`, which turns files and overrides into a
`ResolvedRun`; `run_config` and `sections` have the fields, `compatibility` what cannot run
together, `deepspeed` the JSON that DeepSpeed is given.
"""
