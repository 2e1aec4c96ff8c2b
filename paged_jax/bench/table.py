"""Tables of results: drawn on a terminal, and in Markdown for a README or a pipe."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Table", "markdown", "number", "show", "show_facts"]


@dataclass(frozen=True)
class Table:
    """A title, a heading for each column, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None, digits: int = 3) -> str:
    """At least `digits` significant digits and no exponent, or a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{value:.{digits + 3}f}" if "e" in text else text


def markdown(table: Table) -> str:
    """Aligned, so that it can also be read as it is."""
    cells = (table.columns, *table.rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(row, widths) for row in cells]
    rule = "|".join(("-" * (w + 1) + (":" if i else "-")) for i, w in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "| " + " | ".join(cells) + " |"


def show(table: Table, stream: TextIO | None = None) -> None:
    """Print a table: drawn on a terminal, and always in Markdown to be pasted elsewhere."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(f"\n{table.title}\n\n{markdown(table)}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table as Drawn

    drawn = Drawn(title=table.title)
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        drawn.add_row(*row)
    console = Console(file=stream)
    console.print(drawn)
    print(f"\nThe same in Markdown:\n\n{markdown(table)}\n", file=stream, flush=True)


def show_facts(title: str, facts: Sequence[tuple[str, str]], stream: TextIO | None = None) -> None:
    """Print a table of two columns: what, and how much."""
    show(Table(title, ("figure", "value"), tuple(facts)), stream)
