"""An epoch of a `shard` loader on this rank: waiting for samples, batches, what the optimizers hear of them."""
