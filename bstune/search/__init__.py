"""Which trial comes next: a law of the steps to target, its posterior, and decisions from it."""
