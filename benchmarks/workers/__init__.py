"""The ranks of the other commands: module `x` here runs under horovodrun for `benchmarks.x`."""
