"""The traced step: a graph of ops with phases, the factors of each primitive, shardings on a mesh."""
