"""What `check` says before any work starts: no model is loaded and no server is asked."""
