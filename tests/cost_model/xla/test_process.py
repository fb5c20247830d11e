"""The compiler's process: what reaches it, how it ends, and that nothing stays behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autoshard.cost_model.errors import CompilerError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla import process
from autoshard.cost_model.xla.process import Compiler, Job, compile_all_apart, compile_apart, shortened

pytestmark = pytest.mark.devices

CLUSTER = parse_cluster("8xH100-80GB")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks a stand-in for the compiler, given as code; a temporary folder that must be empty in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def call(code, **options):
        monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", code))
        return compile_apart(b"module", CLUSTER, **options)

    yield call
    assert list(tmp_path.iterdir()) == []


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_environment_is_the_compilers_and_the_users_stays(ask, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--users")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    names = "('XLA_FLAGS', 'JAX_PLATFORMS')"
    code = f"import os, json; print(json.dumps({{'error': ' '.join(os.environ[k] for k in {names})}}))"
    with pytest.raises(CompilerError, match=r"--xla_gpu_autotune_level=0 .* --xla_gpu_\w+=\w+ --hurry cpu\n"):
        ask(code, compiler=Compiler(flags="--hurry"))
    assert (os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"]) == ("--users", "cuda")


def test_the_process_imports_the_cost_model_that_started_it(tmp_path):
    without_site = [sys.executable, "-S", "-P", "-c", "import cost_model.xla"]  # nothing installed is seen
    environment = process._environment("", str(tmp_path))
    assert subprocess.run(without_site, env=environment, cwd=tmp_path, check=False).returncode == 0


def test_the_job_and_the_answer(ask):
    code = """if True:
        import json, sys
        for job in json.loads(sys.stdin.buffer.readline())["jobs"]:
            module = sys.stdin.buffer.read(job["module_bytes"]).decode()
            sizes = ("argument", "output", "alias", "temporary", "host")
            print(json.dumps({"text": job["topology"] + module} | {f"{s}_bytes": n for n, s in enumerate(sizes)}))
    """
    found = ask(code)
    assert (found.text, found.argument_bytes, found.host_bytes) == ("1x1x8module", 0, 4)
    assert found.peak_bytes == 0 + 1 - 2 + 3
    jobs = [Job(b"one", parse_cluster("2xH100-80GB")), Job(b"other", CLUSTER)]
    assert [one.text for one in compile_all_apart(jobs)] == ["1x1x2one", "1x1x8other"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed, as happens when the host's memory runs out"),
        ("1 / 0", "ended with status 1: ZeroDivisionError: division by zero"),
        (
            "import os, sys; sys.stderr.write('W1 a\\nF0101 00:00:00.0 7 a/b.cc:3] Check failed: x\\n    @ 0x1\\n'); "
            "sys.stderr.flush(); os.abort()",
            "ended with status -6: Check failed: x",
        ),
        ('print(\'{"error": "INTERNAL: no"}\')', "the compiler refused the program: no"),
    ],
)
def test_a_compiler_that_fails(ask, code, message):
    with pytest.raises(CompilerError) as caught:
        ask(code)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compiler_that_takes_too_long_is_ended(ask):
    with pytest.raises(CompilerError, match=r"was stopped after 0.3 s, the time limit"):
        ask("import time; time.sleep(60)", compiler=Compiler(timeout_s=0.3))


def test_programs_share_one_end(ask):
    """However much time each program has by itself."""
    with pytest.raises(CompilerError, match=r"was stopped after 60 s, the time limit"):
        ask("import time; time.sleep(60)", compiler=Compiler(timeout_s=60, until_s=time.monotonic() + 0.3))


def test_ctrl_c_ends_the_compiler_and_what_it_started(ask, tmp_path):
    code = """if True:
        import os, subprocess, sys
        below = subprocess.Popen(["sleep", "60"])
        with open(os.path.join(os.environ["TMPDIR"], "ids"), "w") as file:
            file.write(f"{os.getpid()} {below.pid}")
        below.wait()
    """
    ids = []

    def progress(line):
        for file in tmp_path.glob("*/ids"):
            ids.extend(map(int, file.read_text().split()))
        if ids:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(code, progress=progress)
    assert len(ids) == 2
    deadline_s = time.monotonic() + 10
    while any(map(is_running, ids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_running, ids))


def test_a_compiler_whose_parent_is_gone_ends_itself(tmp_path):
    folder = tmp_path / "compiler"
    folder.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "autoshard.cost_model.xla.child"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps({"cuda_folder": "", "jobs": [{"module_bytes": 1}]}).encode() + b"\nx")
    child.stdin.flush()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.3)
    assert child.returncode is None
    child.stdin.close()
    assert child.wait(30) == -signal.SIGKILL
    assert not folder.exists()


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (
            "UNIMPLEMENTED: No FFI handler registered for nowhere on a platform CUDA (canonical cuda)\nmore",
            "No FFI handler registered for nowhere on a platform CUDA (canonical cuda)",
        ),
        (
            'INTERNAL: bad %dot.1, metadata={op_name="jit(step)/dot_general" source_file="/a/b.py" source_line=12}',
            'bad %dot.1, metadata={op_name="jit(step)/dot_general" source_file="/a/b.py" source_line=12} (/a/b.py:12)',
        ),
        ('INTERNAL: during\nop_name="jit(step)/x"', "during (jit(step)/x)"),
        (
            'error: no loc("jit(step)/x"("/a/model.py":7:0))',
            'error: no loc("jit(step)/x"("/a/model.py":7:0)) (/a/model.py:7)',
        ),
        ("", "it gave no reason"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_what_the_compiler_says_is_shortened(message, short):
    assert shortened(message) == short
