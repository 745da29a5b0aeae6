"""Batches of exactly B examples, in micro-batches, from an endless stream of shuffled epochs."""
