"""What a study's means are spent on: the baseline, the search, the fresh seeds, and how long it all takes."""
