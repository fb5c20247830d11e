"""The plan: decisions in words, estimates, JSON, its summary, and the shardings that the executor imposes."""
