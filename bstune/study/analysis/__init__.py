"""What the trials of a study and their posterior say: the critical batch size, S*(B), winners and what follows."""
