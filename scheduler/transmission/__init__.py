"""What gradients travel as, in which order and how fast, decided from measured transfers."""
