"""Random faults in real jobs, one rank per network namespace, judged by the job's recorded history."""
