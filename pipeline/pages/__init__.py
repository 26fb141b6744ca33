"""What the report is made of: words, advice, pictures, tables."""
