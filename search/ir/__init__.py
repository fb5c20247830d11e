"""The traced step: a graph of ops with phases, the factors of each primitive, how values lie on a mesh."""
