"""How sure an interval is that bstune names: its nominal coverage, and the normal quantile of that."""

# The share of truths that it is to hold.
INTERVAL_LEVEL = 0.9
# Of the standard normal distribution: an end lies so many standard deviations from the middle.
INTERVAL_QUANTILE = 1.645
