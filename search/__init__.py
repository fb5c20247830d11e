"""The search: from a flat program and a cluster to the cheapest strategies that fit."""
