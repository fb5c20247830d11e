"""Pipelines: schedules, what they cost, and how layers are cut into stages."""
