"""A study: ask, run, tell, report."""
