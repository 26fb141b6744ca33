"""What the gate judges with: baselines, the ledger of margins, staleness, the comment of a merge."""
