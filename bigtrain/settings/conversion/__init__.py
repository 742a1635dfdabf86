"""Run YAMLs from the configurations of other trainers (`bigtrain convert`). Pure.

`draft.py` has the record that a table of keys fills, `tables.py` the meaning of a row of a
table. A module for each trainer has the meaning of several keys, and its table and defaults if they
are not in a module of their own (`trainer_keys.py`, ...); start with `trainer.py`
(HF TrainingArguments and TRL). `convert.py` finds the trainer of a file, and makes the run.
"""
