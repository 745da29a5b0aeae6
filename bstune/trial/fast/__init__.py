"""Ways to take the steps of a trial in less time.

:mod:`take_steps` chooses the lean loop and CUDA graphs, :mod:`compile` has torch.compile.
"""
