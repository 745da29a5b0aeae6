"""One trial: trained by a Lightning Trainer, or replayed from a table of recorded runs."""
