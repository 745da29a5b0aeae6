"""Published experiments, reproduced: a function and a file of conf/sweep/ each."""
