"""From a traced step to the solver's problem: what is decided together, what each choice costs and holds."""
