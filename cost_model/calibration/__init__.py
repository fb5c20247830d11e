"""Measures the numbers of a cluster file on the attached devices."""
