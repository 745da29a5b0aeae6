"""``prior``: what bstune's posterior assumes."""

from bstune.options.values import Section, Sigma


class PriorOptions(Section):
    """Priors of bstune's posterior, in the search and in the report."""

    level_sigma: Sigma
    """Sigma of the best learning rate around the rule, in octaves, heavy-tailed."""
    exponent_sigma: Sigma
    """Sigma of the exponent of lr*(B) around the rule's."""
