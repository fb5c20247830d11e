"""The commands that need no JAX: `autoshard clusters`, `autoshard report` and `autoshard schema`. Each is a function from
its options to an exit status."""

import argparse
import json

from autoshard import clusters as known_clusters


def report(options: argparse.Namespace) -> int:
    """Writes the report of a saved plan."""
    from autoshard.search.plan.plan import Plan

    Plan.load(options.plan).report(options.out)
    print(f"saved {options.out}: open it in a browser", flush=True)
    return 0


def schema(options: argparse.Namespace) -> int:
    """Prints the JSON schema of a cluster file or a plan file."""
    from autoshard.cost_model import cluster_file  # these take a while to import
    from autoshard.search.plan import plan

    files = {"cluster": cluster_file, "plan": plan}
    print(json.dumps(files[options.file].json_schema(), indent=1), flush=True)
    return 0


def clusters(options: argparse.Namespace) -> int:
    """Lists the presets, or shows a cluster."""
    if options.cluster is None:
        shown = {name: cluster.to_json() for name, cluster in known_clusters.presets().items()}
        print(json.dumps(shown, indent=1) if options.json else known_clusters.preset_table(), flush=True)
        return 0
    cluster = known_clusters.named(options.cluster)
    print(
        json.dumps(cluster.to_json(), indent=1) if options.json else known_clusters.description(cluster),
        flush=True,
    )
    return 0
