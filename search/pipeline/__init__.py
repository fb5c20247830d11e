"""Pipelines: a step cut into stages, and the programs that each of them runs."""
