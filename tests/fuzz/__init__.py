"""Random and damaged input for every decoder and every state machine: `make fuzz`, or `python -m tests.fuzz`."""
