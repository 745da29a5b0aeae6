"""A study in Optuna's storage: opened, asked for trials, told how they ended; connections and leases."""
