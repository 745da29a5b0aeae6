"""What is seen in a few steps before a study: what cannot be trained, tuned or continued is refused or named."""
