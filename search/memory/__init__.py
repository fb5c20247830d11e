"""Memory strategies: which residuals are recomputed in the backward phase, and the step rewritten so."""
