"""What a search decides, as functions of its trials: what a trial may take, what runs next, when it ends."""
