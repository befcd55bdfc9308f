"""Counts a script's lines: all code, and those that exist only because training is distributed.

    python -m common.count 01-ddp-pytorch-only/train_single_machine.py 01-ddp-pytorch-only/train_ddp.py

Code is what is neither blank, comment nor docstring. Boilerplate lines end with the number of their step, `# [3]`;
changed lines are those that the first script does not have.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_STEP = re.compile(r"# \[(\d+)\]\s*$")


class Count(NamedTuple):
    total: int
    boilerplate: int
    steps: int
    """Different numbers among the boilerplate."""
    changed: int


def code_lines(text: str) -> list[str]:
    """The lines that hold code, without their comments."""
    kept: dict[int, str] = {}
    lines = text.splitlines()
    at_start = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if token.type == tokenize.NEWLINE:
            at_start = True
            continue
        is_docstring = at_start and token.type == tokenize.STRING
        at_start = False
        if not is_docstring:
            kept |= {number: lines[number - 1] for number in range(token.start[0], token.end[0] + 1)}
    return [re.sub(r"\s*#.*$", "", line) for _, line in sorted(kept.items())]


def steps(text: str) -> list[int]:
    return [int(found[1]) for line in text.splitlines() if (found := _STEP.search(line))]


def lines_by_step(text: str) -> Counter[int]:
    return Counter(steps(text))


def legend(text: str) -> dict[int, str]:
    """What the steps are, as the script's docstring says: `[3] a device for each`, several a line."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return {int(number): said.strip() for number, said in re.findall(r"\[(\d+)\] (.+?)(?=\s{2,}\[|$)", docstring, re.M)}


def count(path: Path, baseline: Path | None = None) -> Count:
    text = path.read_text()
    code, marked = code_lines(text), steps(text)
    before = code_lines(baseline.read_text()) if baseline else code
    same = difflib.SequenceMatcher(None, before, code, autojunk=False).get_matching_blocks()
    return Count(len(code), len(marked), len(set(marked)), len(code) - sum(block.size for block in same))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", type=Path, help="the first is what the others are compared with")
    flags = parser.parse_args()
    print(f"{'script':<44} {'code':>5} {'boilerplate':>12} {'steps':>6} {'changed':>8}")
    for path in flags.scripts:
        counted = count(path, flags.scripts[0])
        name = "/".join(path.parts[-2:])
        print(f"{name:<44} {counted.total:>5} {counted.boilerplate:>12} {counted.steps:>6} {counted.changed:>8}")


if __name__ == "__main__":
    main()
