"""A study: its plan, its storage, its loop, and the result that it ends with."""
