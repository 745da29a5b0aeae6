"""What a user's project brings: Python objects, a file of LightningCLI, its own values."""
