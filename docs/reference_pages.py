"""Pages of the reference that are made of the program itself, so that they can't go stale.

The command line's text comes from its parser, the keys of plan and cluster files from their JSON Schemas, and the presets'
numbers, with their sources, from the presets: all as the command line prints them.
"""

import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard import cli


def write(folder: Path) -> None:
    """Writes all pages that are generated; a page that stays as it was is left alone, so that it isn't read again.

    Args:
      folder: where; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages: Mapping[str, Iterable[str]] = {
        "command-line.md": _usages(),
        "plan-keys.md": _keys(json.loads(_printed("schema", "plan"))),
        "cluster-keys.md": _keys(json.loads(_printed("schema", "cluster"))),
        "presets.md": _presets(json.loads(_printed("clusters", "--json"))),
    }
    for name, lines in pages.items():
        page, text = folder / name, "\n".join(lines) + "\n"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _printed(*arguments: str) -> str:
    """The text that a command writes to stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(arguments)
    return out.getvalue()


def _usages() -> Iterator[str]:
    """A section for each command, as `--help` prints it."""
    for command in re.findall(r"^    ([\w-]+) ", _printed("--help"), re.MULTILINE):
        yield from (f"## autoshard {command}", "", "```text", _printed(command, "--help").rstrip(), "```", "")


def _keys(schema: Mapping[str, Any]) -> Iterator[str]:
    """A table for each kind of object in a file, the outermost first: its keys, their types and their meaning."""
    kinds = {name: kind for name, kind in schema["$defs"].items() if "properties" in kind}
    if "properties" in schema:
        kinds = {schema["title"]: schema, **kinds}
    outermost = [name for name in _referred(schema.get("anyOf", ())) if name in kinds]
    for name in dict.fromkeys([*outermost, *kinds]):
        kind = kinds[name]
        meaning = kind.get("description", "").partition("\n\n")[0]
        yield from (f"### {name}", "", meaning, "", *_table("key", "type", "meaning"))
        for key, said in kind["properties"].items():
            optional = "" if key in kind.get("required", ()) else ", optional"
            yield f"| `{key}` | {_type(said)}{optional} | {said.get('description', '')} |"
        yield ""


def _table(*titles: str) -> tuple[str, str]:
    """The head of a table."""
    return f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"


def _referred(schemas: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names of the definitions that schemas refer to."""
    return (schema["$ref"].rsplit("/", 1)[-1] for schema in schemas if "$ref" in schema)


def _type(said: Mapping[str, Any]) -> str:
    """A JSON Schema's type in words; a kind of object is a link to its table."""
    for name in _referred([said]):
        return f"[{name}](#{name.lower()})"
    if "anyOf" in said:
        return " or ".join(map(_type, said["anyOf"]))
    if isinstance(said.get("items"), dict):
        return f"list of {_type(said['items'])}"
    if isinstance(said.get("additionalProperties"), dict):
        return f"object of {_type(said['additionalProperties'])}"
    return said.get("type", "any")


def _presets(presets: Mapping[str, Any]) -> Iterator[str]:
    """A section for each preset: the numbers of a full node, each with its source."""
    for name, cluster in presets.items():
        yield from (f"## {name}", "", *_table("number", "value", "source"))
        sources = cluster.pop("sources")
        for path, value in _numbers(cluster):
            yield f"| `{path}` | {value} | {_source(sources, path)} |"
        yield ""


def _numbers(said: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in said.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif key != "name":
            yield f"{prefix}{key}", value


def _source(sources: Mapping[str, str], path: str) -> str:
    """The source of a number, or of the table that it is in."""
    return sources.get(path) or sources.get(path.rpartition(".")[0], "")
