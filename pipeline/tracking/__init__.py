"""MLflow: what is logged of each variant and state, and the model registry. Only this room imports mlflow.

connection.py  reach a server or database, find or write one run
runs.py        one run for each variant, one for each state of the pipeline
registry.py    variants as model versions; the alias `champion`
views.py       the saved view and pictures that MLflow's UI shows
"""
