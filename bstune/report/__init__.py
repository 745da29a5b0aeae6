"""What a study found, in words, in one figure and on one page; and how to read it back."""
