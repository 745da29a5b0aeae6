"""What the trials of a study and their posterior say: critical batch size, S*(B), winners."""
