"""What the command line writes to stderr beside the lines for its stages."""


def is_stage(line: str) -> bool:
    return line.startswith("autoshard: ") and not line.startswith(("autoshard: error", "autoshard: warning"))


def without_stages(err: str) -> str:
    return "".join(line for line in err.splitlines(keepends=True) if not is_stage(line))
