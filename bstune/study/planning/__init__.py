"""What a study's means are spent on: baseline, search and fresh seeds; and how long it takes."""
