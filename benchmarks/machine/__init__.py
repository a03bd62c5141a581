"""Slow, stopped and remote resources: device time, CPU quotas, stopped and killed processes, hosts and their links."""
