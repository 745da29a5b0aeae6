"""The search over batch size and learning rate: its space, its plan and the Optuna study."""
