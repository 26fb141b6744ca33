"""MLflow: what is logged of each variant and state, and the model registry. Only this room imports mlflow."""
