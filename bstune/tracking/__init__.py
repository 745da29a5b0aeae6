"""Where a study's runs are logged: MLflow."""
