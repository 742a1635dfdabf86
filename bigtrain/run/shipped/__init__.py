"""Callbacks of bigtrain, which a run YAML names by short names: `webhook`, `prometheus`,
`opentelemetry`, `trainjob` (the table is `SHIPPED_CALLBACKS` of
`bigtrain.settings.sections.extensions`). Only `bigtrain.run.callbacks` makes them, on the main
rank, as ``Class(settings, config, warn)``. No callback ends a run because a server is unreachable.
"""
