"""`bigtrain doctor`: probes that run on hosts, and the verdicts on what they say.

Start with `examination`, which sends `host_probe` everywhere (`transport`), gathers what it prints
and asks `verdicts`. `collective_probe` is the only file here with torch: it runs on the hosts.
"""
