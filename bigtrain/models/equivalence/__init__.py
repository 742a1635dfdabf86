"""Equivalence tests on a proxy model: sharded, packed and chunked against plain. Imports all other
folders of `models`. Start with `model_plan`; `trial` is the harness."""
