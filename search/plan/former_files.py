"""Plan files of earlier versions, in today's form.

There were three forms: one program (`autoshard.plan/1`), a program per stage (`autoshard.pipeline/2`) and one program for
all stages (`autoshard.one-program/2`). Values are only moved here. Pydantic checks them afterwards, so that a missing or
wrong value is named as in a file of today.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.executors import JIT, MPMD, SPMD
from autoshard.search.plan.json_file import sealed
from autoshard.search.plan.values import REPLICA

JSON = dict[str, Any]

_OF_SHARDING = ("mesh", "arguments", "ops", "copies", "group")
_OF_ALL = ("step", "fingerprint", "jax", "cluster", "groups", "options", "meshes", "memory_bytes", "outline")
_BESIDES = ("seal", "search_s")


def in_new_form(file: Mapping[str, Any], place: str) -> JSON:
    """A file of an earlier version as it would be written today, but for its seal.

    Raises:
      PlanError: a value is missing, or stands elsewhere than in files of that form.
    """
    try:
        return {**_some(file, _OF_ALL), **READERS[file["schema"]](file)}
    except KeyError as e:
        raise PlanError(f"{place}: {e.args[0]} is missing") from None
    except (TypeError, AttributeError, ValueError) as e:
        raise PlanError(f"{place} is no file of the form {file['schema']}: {e}") from None


def is_sealed(file: Mapping[str, Any]) -> bool:
    """Whether a file of an earlier version is as it was written."""
    kept = {key: value for key, value in file.items() if key not in _BESIDES}
    return file.get("seal") == sealed(kept)["seal"]


def _of_one_program(file: Mapping[str, Any]) -> JSON:
    decisions, estimates = file["decisions"], dict(file["estimates"])
    shares = estimates.pop("shares", None)
    kept = {"gap": estimates.pop("gap"), "marks": estimates.pop("marks", "")}
    return kept | {
        "executor": JIT,
        "microbatches": decisions.get("microbatches", 1),
        "retention": decisions["retention"],
        "shardings": [_some(decisions, _OF_SHARDING)],
        "estimates": estimates | ({"shares": [shares]} if shares else {}),
    }


def _of_programs_per_stage(file: Mapping[str, Any]) -> JSON:
    meshes = [(one.get("group", ""), list(one["mesh"].values())) for one in file["decisions"]]
    stages: list[JSON] = []
    for stage, group in zip(file["stages"], _groups(file), strict=True):
        replicas, *rest = stage["mesh"].values()
        if (group, rest) not in meshes:
            on = f" on {group}" if group else ""
            raise ValueError(f"no decisions for replicas of mesh {tuple(rest)}{on}")
        stages.append(
            {
                "first_op": stage["first_op"],
                "replicas": replicas,
                "sharding": meshes.index((group, rest)),
            }
        )
    return {
        "executor": MPMD,
        **_some(file, ("schedule", "workers", "microbatches", "retention", "estimates")),
        "stages": stages,
        "shardings": [_some(one, _OF_SHARDING) for one in file["decisions"]],
    }


def _groups(file: Mapping[str, Any]) -> Sequence[str]:
    """The group of nodes on which each stage stands; one after another."""
    sizes = {group["name"]: group["num_devices"] for group in file["cluster"].get("groups", ())}
    group_of = [name for name in file.get("groups", ()) for _ in range(sizes[name])]
    found, first = list[str](), 0
    for stage in file["stages"]:
        found.append(group_of[first] if group_of else "")
        first += prod(stage["mesh"].values())
    return found


def _of_one_program_for_all(file: Mapping[str, Any]) -> JSON:
    estimates, num_stages = dict(file["estimates"]), file["stages"]
    shares = estimates.pop("shares", None)
    of_stage = {
        key: estimates.pop(key)
        for key in ("forward_s", "backward_s", "update_s", "residual_bytes", "state_bytes")
    }
    of_stage["peak_bytes"] = estimates["peak_bytes"]
    alone: JSON = {"mesh": {"data": 1}, "arguments": {}, "ops": {}, "copies": {}}
    return {
        "executor": SPMD,
        **_some(file, ("schedule", "microbatches", "retention")),
        "workers": file["mesh"]["stage"],
        "stages": [{"replicas": file["mesh"][REPLICA]}] * num_stages,
        "shardings": [_some(file.get("decisions", alone), _OF_SHARDING)],
        "estimates": estimates
        | {"stages": [of_stage] * num_stages}
        | ({"shares": [shares]} if shares else {}),
    }


READERS: Mapping[str, Callable[[Mapping[str, Any]], JSON]] = MappingProxyType(
    {
        "autoshard.plan/1": _of_one_program,
        "autoshard.pipeline/2": _of_programs_per_stage,
        "autoshard.one-program/2": _of_one_program_for_all,
    }
)
"""By the schema of an earlier version, a function that moves the values of its files."""


def _some(values: Mapping[str, Any], keys: Sequence[str]) -> JSON:
    return {key: values[key] for key in keys if key in values}
