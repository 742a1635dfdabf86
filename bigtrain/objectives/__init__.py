"""Kinds of objectives: a module each with the kind's fields, rows, unit, reference and checks.

`kind.py` has the record that settings, data, planner, engine and export ask; `section.py` lists the
kinds. These files are pure. `losses/` has the loss and the metrics of a kind, with torch, in a file
of the same name. No other folder compares the name of a kind. Start with `kto.py`. A new kind is
such a module, its loss, and a row in `section.py` ("Adding an objective" in CONTRIBUTING.md).
"""
