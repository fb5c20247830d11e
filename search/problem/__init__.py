"""From a traced step to the solver's problem: groups of ops that are decided together, and the time and memory of each
choice."""
