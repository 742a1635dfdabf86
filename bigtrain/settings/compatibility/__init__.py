"""Incompatible settings, as a table of rules over the facts of a run.

`facts` has the settings that rules are about, `rule` what a rule is, `features` what rules combine;
`parallelism`, `engine` and `training` are the table, which `check` applies.
"""
