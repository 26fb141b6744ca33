"""What the report shows: words, tables, plots."""
