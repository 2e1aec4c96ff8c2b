"""The house: who may import whom, what loads how lightly, and what no file may say."""

import ast
import graphlib
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("scheduler", "pallas_kernels", "paged_jax", "serve")

# What each package may import besides the standard library and itself.
MAY_IMPORT = {
    "scheduler": {"numpy"},
    "pallas_kernels": {"jax", "numpy", "jaxtyping"},
    "paged_jax": {
        "scheduler",
        "pallas_kernels",
        "flax",
        "gguf",
        "huggingface_hub",
        "jax",
        "jaxlib",
        "jaxtyping",
        "jinja2",
        "llguidance",
        "ml_dtypes",
        "msgspec",
        "numpy",
        "orbax",
        "rich",
        "safetensors",
        "tokenizers",
    },
    "serve": {
        "paged_jax",
        "msgspec",
        "opentelemetry",  # an extra, imported where it is used
        "prometheus_client",
        "starlette",
        "uvicorn",
    },
}
# The one exception: the command line starts the server, inside that command.
EXCEPTIONS = {("paged_jax/cli.py", "serve")}

# The order inside paged_jax, from the bottom up: a module imports from its own floor and below,
# and never in a circle. A new module gets its place here.
FLOORS = (
    {"errors", "config", "outputs", "cache", "progress", "flags", "jobs", "compile_log"}
    | {"step_clock"},
    {"kv_cache", "host_blocks", "sharding", "layers", "attention", "rope", "rope_scaling"}
    | {"compile_cache", "compile_options"}
    | {"packing", "params", "salts", "weights", "quantization", "lora", "taps"},
    {"models", "penalties", "sampling", "checkpoint", "hub", "generation_config"}
    | {"tokenizer", "chat_template", "detokenizer", "stop_strings", "token_text"}
    | {"prompts", "response", "beam_search", "logit_edits"},
    {
        "model_runner",
        "plan",
        "tensor_parallel",
        "adapters",
        "captures",
        "compiling",
        "configured_model",
        "engine_stats",
        "grammar",
        "kv_memory",
        "logged_scheduler",
        "request_checks",
        "steering",
        "token_rules",
        "prompt_scores",
        "asked",
    },
    {"engine", "testing"},
    {"async_engine", "llm", "tunix_rollout"},
    {"machine", "doctor", "convert", "generate", "bench", "cli", "__init__", "__main__"},
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every (module, names) that the file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            yield node.module, tuple(alias.name for alias in node.names)


def exported(package: str) -> set[str]:
    """The names in `__all__` of the package's front door."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package}/__init__.py has no __all__")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows(package):
    allowed = {*sys.stdlib_module_names, package, *MAY_IMPORT[package]}
    wrong = [
        f"{name} imports {module}"
        for path in sources(package)
        for name in [path.relative_to(ROOT).as_posix()]
        for module, _ in imports_of(path)
        if module.partition(".")[0] not in allowed
        and (name, module.partition(".")[0]) not in EXCEPTIONS
    ]
    assert not wrong


def test_the_server_is_imported_only_inside_its_command():
    outside = [
        ast.unparse(node)
        for node in ast.parse((ROOT / "paged_jax" / "cli.py").read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "serve" in ast.unparse(node).split()
    ]
    assert not outside


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_meet_at_their_front_doors(package):
    wrong = []
    for path in sources(package):
        for module, names in imports_of(path):
            top = module.partition(".")[0]
            if top not in PACKAGES or top == package:
                continue
            if module != top:
                wrong.append(f"{path.relative_to(ROOT)}: from {module}, past the front door")
            elif not names:
                wrong.append(f"{path.relative_to(ROOT)}: import {module}, which names nothing")
            elif private := set(names) - exported(top):
                wrong.append(f"{path.relative_to(ROOT)}: {private} not in {top}.__all__")
    assert not wrong


def paged_jax_graph() -> dict[str, set[str]]:
    """Which of its own top-level modules each module of paged_jax imports."""
    package = ROOT / "paged_jax"
    graph: dict[str, set[str]] = {}
    for path in sources("paged_jax"):
        module = path.relative_to(package).parts[0].removesuffix(".py")
        needs = graph.setdefault(module, set())
        for name, taken in imports_of(path):
            top, _, rest = name.partition(".")
            if top != "paged_jax":
                continue
            if rest:
                needs.add(rest.partition(".")[0])
            else:
                modules = {
                    t for t in taken if (package / t).is_dir() or (package / f"{t}.py").is_file()
                }
                needs |= modules | ({"__init__"} if set(taken) - modules else set())
        needs.discard(module)
    return graph


def test_paged_jax_is_built_from_the_bottom_up():
    floor_of = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
    graph = paged_jax_graph()
    assert not set(graph) - set(floor_of), "a new module needs its place in FLOORS"
    upwards = [
        f"{module} imports {needed}, which stands above it"
        for module, needs in graph.items()
        for needed in needs
        if floor_of[needed] > floor_of[module]
    ]
    assert not upwards
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def fresh_python(*args: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *args], env=env, cwd="/", capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import scheduler", {"jax", "jaxlib", "flax", "starlette", "paged_jax"}),
        ("import pallas_kernels", {"flax", "orbax", "starlette", "scheduler", "paged_jax"}),
        ("import paged_jax", {"jax", "jaxlib", "flax", "orbax", "numpy", "starlette"}),
        ("from paged_jax import EngineConfig, SamplingParams", {"jax", "flax", "orbax"}),
        ("import paged_jax.hub", {"jax", "flax", "orbax"}),
        ("import paged_jax.cli", {"jax", "flax", "orbax", "starlette", "uvicorn", "serve"}),
    ],
)
def test_an_import_stays_light(statement, absent):
    done = fresh_python("-c", f"{statement}; import sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & absent


def test_help_is_quick_and_loads_no_jax():
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    seconds = []
    for _ in range(3):  # the best of three: other programs share the caches of this machine
        before = cpu_seconds()
        done = fresh_python("-X", "importtime", "-m", "paged_jax.cli", "--help")
        seconds.append(cpu_seconds() - before)
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout
        assert not {"jax", "flax", "orbax"} & {
            line.split()[-1] for line in done.stderr.splitlines()
        }
    assert min(seconds) < 0.5


@pytest.mark.parametrize("name", ["scheduler", "pallas_kernels"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_an_intruder_on_the_path_is_named(tmp_path, name, kind):
    intruder = tmp_path / (f"{name}.py" if kind == "module" else f"{name}/__init__.py")
    intruder.parent.mkdir(exist_ok=True)
    intruder.write_text("")
    done = fresh_python("-c", "import paged_jax", path=(tmp_path, ROOT))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(intruder) in last


def test_a_stray_folder_without_code_does_no_harm(tmp_path):
    (tmp_path / "scheduler").mkdir()
    done = fresh_python("-c", "import paged_jax", path=(tmp_path, ROOT))
    assert done.returncode == 0, done.stderr


def test_no_script_and_no_folder_of_tests_bears_a_packages_name():
    scripts = {path.name.partition(".")[0] for path in (ROOT / "scripts").iterdir()}
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not (scripts | folders) & set(PACKAGES)


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


# Joined here so that this file does not hold them either.
FORBIDDEN = tuple(
    "".join(parts).encode()
    for parts in [
        ("pypi", ".org"),
        ("files.python", "hosted"),
        ("registry.npm", "js"),
        ("deb.deb", "ian"),
        ("/", "work/"),
        ("/", "root/"),
        ("/opt", "/"),
        ("--extra-index", "-url"),
        ("--find-", "links"),
    ]
)


def test_no_tracked_file_names_a_registry_or_a_machine():
    found = [
        f"{path.relative_to(ROOT)} holds {word.decode()}"
        for path in tracked_files()
        if path.is_file()
        for word in FORBIDDEN
        if word in path.read_bytes()
    ]
    assert not found


def test_the_project_file_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in PACKAGES
        for path in sources(package)
    }
    assert found <= set(listed)
