"""What the rest stands on that touches the machine: files, terminal, signals, secrets."""
