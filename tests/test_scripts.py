"""The scripts that people and CI both call, and the locked dependencies that they install."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ci_runs_the_test_script():
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> dict[str, set[str]]:
    """The versions of each package in the file; each entry has a hash and none an address."""
    versions: dict[str, set[str]] = {}
    for entry in (ROOT / file).read_text().replace("\\\n", " ").splitlines():
        match = re.match(r"([\w.-]+)==(\S+) .*--hash=sha256:[0-9a-f]{64}", entry)
        assert match, f"{file}: {entry:.80}"
        assert "://" not in entry
        versions.setdefault(normal(match[1]), set()).add(match[2])
    return versions


def names(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def test_every_dependency_is_locked():
    """After a change in pyproject.toml, scripts/lock.sh writes the two files anew."""
    run, dev = locked("constraints.txt"), locked("constraints-dev.txt")
    project = PROJECT["project"]
    needed = names(project["dependencies"]) | names(PROJECT["build-system"]["requires"])
    assert needed <= set(run)
    assert names(project["optional-dependencies"]["dev"]) <= set(dev)


def test_tests_run_on_the_versions_that_users_get():
    run, dev = locked("constraints.txt"), locked("constraints-dev.txt")
    assert run.items() <= dev.items()
