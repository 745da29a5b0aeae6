"""What shows a finished study, from the plain data that it leaves: answer, figure, pages."""
