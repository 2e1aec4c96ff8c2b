"""`scripts/device_check.sh`, tried with tiny sizes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_device_check_works_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        ["bash", "scripts/device_check.sh", "--smoke", "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["checks"] and all(check["ok"] for check in results["checks"])
    assert {row["case"] for row in results["times"]} == {"decode 2 x 64", "prefill 64"}
    assert all(row["xla_s"] > 0 and row["share_of_copy"] > 0 for row in results["times"])
    assert results["steps"][0]["xla_s"] > 0
