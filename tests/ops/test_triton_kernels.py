"""Triton kernels compute what PyTorch does: the scripts of `kernels/`. Without a GPU Triton interprets them, which is
set before its import: so in one process for all, whose imports take longer than the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.gpu(required=False)]
SCRIPTS = {
    file.stem: str(file)
    for file in sorted(Path(__file__).parent.glob("kernels/*.py"), reverse=True)
}
RUN_ALL = """
import json, runpy, sys, traceback
from mvp_engine.ops import attention, cudnn_attention, flex_attention, fp8, linear_cross_entropy
from mvp_engine.ops import attention
from mvp_engine.ops import torch_varlen
errors = {"above": [name for name in sys.modules if name == "transformers" or name.startswith("mvp_engine.hf")]}
for name, file in json.loads(sys.argv[1]).items():
    try:
        runpy.run_path(file)
    except BaseException:
        errors[name] = traceback.format_exc()
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors():
    """Tracebacks of scripts that failed; under `above`, modules of upper layers that the import of all ops imports."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", RUN_ALL, json.dumps(SCRIPTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_triton_kernels_compute_what_pytorch_does(errors, name):
    assert name not in errors, errors[name]


def test_ops_import_does_not_import_transformers(errors):
    assert errors["above"] == []
