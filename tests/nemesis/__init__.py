"""Faults at random moments in real jobs, one rank per network namespace, and a history that shows what became of it."""
