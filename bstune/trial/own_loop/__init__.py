"""Trials that a training loop of the user's own trains."""
