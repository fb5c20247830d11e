"""One step on many clusters: a search for each, and which of them pay."""
