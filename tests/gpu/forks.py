"""Compilers that are forks of one process, which has imported JAX: a process of its own would take a second to import it.

`python -m tests.gpu.forks SOCKET` is that process. `python tests/gpu/forks.py of SOCKET` is a stand-in for
`cost_model.xla.child`: it hands its files and the compiler's environment on, waits, and ends as the fork has ended. Each
fork leads a process group, reads XLA's flags and loads the plugin, as the child does.
"""

import json
import os
import select
import socket
import sys
import traceback
from contextlib import suppress

HANDED_ON = ("TMPDIR", "XLA_FLAGS")
MAX_BYTES = 1 << 16


def stand_in(address: str) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        environment = {name: os.environ[name] for name in HANDED_ON}
        socket.send_fds(server, [json.dumps(environment).encode()], [0, 1, 2])
        status = int(server.recv(MAX_BYTES))
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def serve(address: str) -> None:
    """One compiler after another, until standard input is closed."""
    import gc

    import autoshard.cost_model.xla.child
    import autoshard.cost_model.xla.compiler  # noqa: F401, which no fork need import again

    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("listening", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            asking, _ = listening.accept()
            with asking:
                text, files, *_ = socket.recv_fds(asking, MAX_BYTES, 3)
                pid = os.fork() or _compile(json.loads(text), files)
                for file in files:
                    os.close(file)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # whoever asked may have been killed meanwhile
                    asking.sendall(str(status).encode())


def _compile(environment: dict[str, str], files: list[int]) -> int:
    from autoshard.cost_model.xla import child

    os.setpgid(0, 0)
    os.environ.update(environment)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    try:
        child.main()
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "of":
        sys.exit(stand_in(sys.argv[2]))
    serve(sys.argv[1])
