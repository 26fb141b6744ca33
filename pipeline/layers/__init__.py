"""What each group of layers costs: groups, the values that formats store, swaps in memory, mixes of formats."""
