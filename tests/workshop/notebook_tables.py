"""Reads tables and pictures out of executed notebooks."""

from __future__ import annotations

import re
from typing import Any


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def table(notebook: Any, column: str) -> dict[str, dict[str, float]]:
    """By row and column, the one table that has this column."""
    (html,) = [each["data"]["text/html"] for each in outputs(notebook) if f">{column}<" in str(each.get("data"))]
    header, *rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)
    ]
    return {row[0]: dict(zip(header[1:], map(float, row[1:]), strict=True)) for row in rows}
