"""Ways in from other people's tools."""
