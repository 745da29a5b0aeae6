"""The verbs of the command line for finished studies, recorded tables and one run."""
