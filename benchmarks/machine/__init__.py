"""What is slow, stopped or far away: device time, CPU quotas, stopped and killed processes, hosts and their links."""
