"""Incompatible settings, as a table of rules over the facts of a run.

`rules.yaml` has the rules, `facts` the settings that they are about; `check` applies them.
"""
