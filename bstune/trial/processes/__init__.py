"""The processes that train, and what they print."""
