"""The lines of an answer: a file for each line, or for a family of lines.

A line is a function of a result, which yields its texts. Where a text cannot be told, nothing or
None is yielded in its place.
"""
