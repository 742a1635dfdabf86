"""Progress and write permission of a run: watchdog, heartbeat, fencing, stopping.

Imports `engine.startup`, `models` and `system`, not the session, which imports it; so do the loop
and `checkpointing`. Start with `watchdog` (hangs) and `fencing` (stale launches).
"""
