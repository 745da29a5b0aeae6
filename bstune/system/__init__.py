"""What bstune asks of the machine and the terminal: files, signals, secrets, errors, printing."""
