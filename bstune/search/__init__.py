"""The search over batch size and learning rate: the sampler, its posterior, and how it decides."""
