"""Trials on a small proxy model: does it compute the same when it is cut, packed, chunked?

They answer for any architecture what no table knows, before a run begins. Imports all other rooms
of `models`. Start with `model_plan`, which tries what a run asks for; `proxy_model` makes the small
model, `thresholds` brings its lengths within reach.
"""
