"""What a project of the user's own brings: Python objects, a config file of LightningCLI, its own values."""
