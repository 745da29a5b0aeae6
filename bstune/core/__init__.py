"""Plain values and arithmetic: numpy and scipy only."""
