"""Training run: context, log, loop, start and end. Read `training` first (one launch from start to
end), then `loop`; `session` opens the resources of a launch, `preflight` has the checks before
it."""
