"""The kernels of flash-linear-attention, run on a CPU by Triton's interpreter, equal torch on packed sequences.

Needs the package, which the tests run without. With it in a folder of its own:

    pip install --no-deps --target /tmp/fla fla-core einops
    PYTHONPATH=/tmp/fla pytest --campaign tests/hf/test_interpreted_kernels.py
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CAMPAIGN

HERE = Path(__file__).parent


@CAMPAIGN
@pytest.mark.skipif(
    importlib.util.find_spec("fla") is None,
    reason="flash-linear-attention (fla-core) not installed",
)
@pytest.mark.parametrize(
    "model, decay",
    [
        ("qwen3_5_text", "by_head"),
        ("qwen3_5_text", "by_channel"),
        ("kimi_linear", "by_channel"),
        ("mamba2", "by_head"),
        ("mamba2", "by_channel"),
    ],
)
def test_interpreted_kernels_give_log_probs_and_gradients_of_the_reference(model, decay):
    # In a process of its own: Triton decides at import whether to interpret.
    paths = [*map(str, (HERE, HERE.parent, HERE.parents[1])), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(HERE / "interpreted_kernels.py"), model, decay]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        {name: max(values.values()) for name, values in found.items() if isinstance(values, dict)}
    )
    assert found["launches"] > 0
    assert max(found["float32"].values()) <= 1e-5
    # Both round to bfloat16, at other places.
    assert max(found["bfloat16"].values()) <= 2 * max(found["bfloat16 reference"].values())
    assert found["bfloat16"]["log_probs"] <= 2 * found["bfloat16 reference"]["log_probs"]
    assert max(found["neighbours"].values()) == 0
    assert found["without boundaries"]["log_probs"] > 0.1
