"""Verification: a plan's predictions beside the program that XLA's GPU compiler makes of it."""
