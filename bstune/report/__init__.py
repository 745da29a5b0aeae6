"""What shows a finished study, from the plain data that it leaves: its answer in words, its figure, its pages."""
