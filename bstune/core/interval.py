"""How sure the intervals are that bstune names."""

# Nominal coverage: the share of truths that an interval is to hold.
INTERVAL_LEVEL = 0.9
# The ends of that interval of a normal distribution lie so many standard deviations from its
# middle.
INTERVAL_QUANTILE = 1.645
