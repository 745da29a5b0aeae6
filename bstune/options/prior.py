"""``prior``: what bstune's posterior assumes."""

from bstune.options.values import Section, Sigma


class PriorOptions(Section):
    """Sigmas of the prior of the best learning rate around the rule: of its level and exponent."""

    level_sigma: Sigma
    """Prior's sigma of the best learning rate around the rule, in octaves."""
    exponent_sigma: Sigma
    """Prior's sigma of the best rate's exponent over B around the rule's."""
