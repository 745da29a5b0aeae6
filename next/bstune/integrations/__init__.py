"""Trainers of other packages under a study."""
