"""What the stage `track` hands to MLflow, and how it is reached."""
