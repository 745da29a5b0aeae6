"""One trial that is reported to, the loops that train it, and the process that they run in."""
