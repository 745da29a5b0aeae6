"""bstune's sampler as an OptunaHub package: ``optunahub.load_module("samplers/frontier").FrontierSampler``."""

from bstune import FrontierSampler
from bstune import Target


__all__ = ["FrontierSampler", "Target"]
