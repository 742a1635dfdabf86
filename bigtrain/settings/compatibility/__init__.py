"""Incompatible settings, as a table of rules over the facts of a run.

Imports `bigtrain.errors` only; `resolve`, the planner, the engine and tools/compatibility.py import
it. Start with `check`, which applies every rule and returns all violations. `facts` defines what a
rule can read; the rules are in the other files.
"""
