"""What a search decides, as functions of its trials: what runs next, how long, when it ends."""
