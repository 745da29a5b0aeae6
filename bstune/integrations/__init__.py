"""Bridges to other packages' training loops, a module each; none is imported by anything else."""
