"""XLA's own GPU compiler as an oracle: it runs in a separate process, and its compiled programs are read here."""
