"""quantgate: one stage, one verb, one file. `dvc.yaml` is the table of contents."""
