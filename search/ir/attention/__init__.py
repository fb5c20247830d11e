"""Attention as one op, computed in blocks."""
