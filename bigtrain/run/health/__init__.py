"""Progress and write permission of a run: watchdog, heartbeat, fencing, stopping. Start with
`watchdog` (hangs) and `fencing` (stale launches)."""
