"""The experiments that sweeps run: one module each, with a function ``run`` that returns a Finding."""
