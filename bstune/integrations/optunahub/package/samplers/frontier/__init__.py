"""bstune's sampler as an OptunaHub package.

``optunahub.load_module("samplers/frontier").FrontierSampler`` loads it.
"""

from bstune import FrontierSampler
from bstune import Target


__all__ = ["FrontierSampler", "Target"]
