"""What a study shows: a live line, table and page while it runs, and its answer at the end."""
