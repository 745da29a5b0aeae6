"""The parts of a trial, one job each, which share one state; :mod:`assemble` puts them together."""
