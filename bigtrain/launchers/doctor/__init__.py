"""`bigtrain doctor`: probes that run on hosts, and checks of their results.

Imports the rest of `launchers` and `system`; only the command imports it. Start with
`examination`, which runs `host_probe` on every host (`transport`), collects its output and applies
the checks of `verdicts`. `collective_probe` is the only file here with torch: it runs on the hosts.
"""
