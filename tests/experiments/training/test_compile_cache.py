"""The folder for compiled code, ``--compile-cache``, and that it can be moved."""

import os
from pathlib import Path

import pytest
from programs import run_program

from isda.experiments.errors import InputError
from isda.experiments.training.device import keep_compiled_code

COMPILE = """
import sys
from pathlib import Path
from isda.experiments.training.device import keep_compiled_code
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

config.cpp.vec_isa_ok = True  # else a program is compiled to find out, as long as the function
counters.clear()
with keep_compiled_code(Path(sys.argv[1])):
    found = torch.compile(lambda x: x.sin() + 1, dynamic=False)(torch.ones(3))
    assert torch.equal(found, torch.ones(3).sin() + 1)
    print(sum(counters[kind][f"{name}_cache_hit"]
              for kind, name in (("inductor", "fxgraph"), ("aot_autograd", "autograd"))))
"""


def hits(folder: Path) -> int:
    """Compile a function in a new process; number of results that were found in the folder."""
    script = folder.parent / "compile.py"
    script.write_text(COMPILE)
    done = run_program(script, folder)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_compiled_code_is_stored_and_found_after_a_move(tmp_path: Path) -> None:
    assert hits(tmp_path / "here") == 0
    files = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert any("fxgraph" in str(path) for path in files)
    (tmp_path / "here").rename(tmp_path / "there")
    assert hits(tmp_path / "there") > 0
    assert not (tmp_path / "here").exists()


def test_environment_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    before = dict(os.environ)
    with keep_compiled_code(None):
        assert dict(os.environ) == before
    with keep_compiled_code(tmp_path / "cache"):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert dict(os.environ) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"), keep_compiled_code(tmp_path / "file"):
        pass
