"""The processes that train (`workers.py` first), and what they print."""
