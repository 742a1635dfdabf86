"""Progress and write permission of a run: watchdog, heartbeat, fencing, stopping. Start with
`watchdog`, which ends hung runs, and `fencing`, which stops stale launches."""
