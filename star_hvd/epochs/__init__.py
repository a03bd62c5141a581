"""An epoch of a `shard` loader on this rank: waiting for samples, delivering batches, informing the optimizers."""
