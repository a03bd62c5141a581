"""The input of a rank's training loop: which samples, in which order and batch sizes, loaded by which workers."""
