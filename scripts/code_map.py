"""Rewrites the map of the code in README.md from the first lines of the modules' docstrings.

python scripts/code_map.py            rewrites it
python scripts/code_map.py --check    only says whether it is up to date
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- code map: begin -->\n", "<!-- code map: end -->\n"
ROOMS = {
    "scheduler": "the brain: NumPy only",
    "pallas_kernels": "the muscles: pure JAX functions",
    "paged_jax": "the body: models, device state, the engine loop",
    "serve": "the door: HTTP in, server-sent events out",
}


def code_map() -> str:
    """One list for each package, one line for each file that says anything."""
    parts = []
    for room, purpose in ROOMS.items():
        parts.append(f"\n**`{room}/`**, {purpose}\n\n")
        for path in sorted((ROOT / room).rglob("*.py")):
            if text := ast.get_docstring(ast.parse(path.read_text())):
                first = " ".join(text.split("\n\n")[0].split())
                parts.append(f"- `{path.relative_to(ROOT / room).as_posix()}`: {first}\n")
    return "".join(parts) + "\n"


def with_map(readme: str) -> str:
    """The README's text with the map between the two markers replaced by the present one."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + code_map() + END + after


if __name__ == "__main__":
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = with_map(old)
    if sys.argv[1:] != ["--check"]:
        readme.write_text(new)
    elif new != old:
        sys.exit("README.md: the map of the code is out of date; scripts/lint.sh --fix mends it")
