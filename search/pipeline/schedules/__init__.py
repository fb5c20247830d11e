"""Families of schedules, each in its file with its paper; `registry` knows them by name."""
