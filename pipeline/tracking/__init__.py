"""MLflow: runs of variants and states, and the model registry. Only this package imports mlflow."""
