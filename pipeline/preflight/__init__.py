"""What `check` says before any work."""
