"""The laboratory of `benchmarks.tta`: what is trained, who is slow when, a rank's training loop, its figures."""
