"""The search space of one step, and its queue: variants of the step, their meshes, and their rewrites."""
