"""Programs that run: a plan written into its step."""
