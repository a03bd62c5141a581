"""What feeds the training loop of a rank: which samples, in which order, in batches of which size, by which workers."""
