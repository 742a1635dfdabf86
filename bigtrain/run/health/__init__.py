"""Whether the run lives and may write: watchdog, heartbeat, fencing, stopping. Below the
session."""
