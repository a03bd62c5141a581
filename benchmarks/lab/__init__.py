"""The laboratory of `benchmarks.tta`: tasks, slowdown scenarios, a rank's training loop, and its figures."""
