"""Lightning itself: its two packages, the Trainer of a trial, and the private members of it that are read."""
