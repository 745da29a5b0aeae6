"""Small tables of recorded runs, as package data: ``workload.table=NAME``."""
