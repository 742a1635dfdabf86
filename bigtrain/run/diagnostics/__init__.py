"""Monitoring of each step of a run: bad updates, slow ranks, memory, times, profiles. Start with
`step_guard` (skipped updates) and `step_clock` (time by part of a step)."""
