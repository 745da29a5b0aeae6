"""Recorded runs that ship; tables.yaml says what each is."""
