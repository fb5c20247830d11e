"""What hardware is and what work costs on it."""
