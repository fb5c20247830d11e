"""XLA's own GPU compiler as oracle: started in a process of its own, and what its programs say."""
