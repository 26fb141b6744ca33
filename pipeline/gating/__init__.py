"""How a merge is judged: rules and verdicts, the baseline, freshness, policy, the comment."""
