"""Executors: they turn a step and its plan into programs that run."""
