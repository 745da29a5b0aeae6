"""What a few steps show before a study: what cannot be trained, tuned or continued."""
