"""The lines of an answer, a function each, and what they say of one: a file a line or a family of them."""
