"""What a merge is judged by: rules and verdicts, the baseline, freshness, policy, the comment."""
