"""Pipelines: schedules and their costs, and the cut of layers into stages."""
