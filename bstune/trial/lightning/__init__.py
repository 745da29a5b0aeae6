"""Lightning itself: its two packages, a trial's Trainer, and private members that are read."""
