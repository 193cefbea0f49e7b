"""Write the list of mistakes into docs/howto/troubleshooting.md, from those that the tests make.

python docs/mistakes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.real.mistakes import SECTIONS, Mistake  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "troubleshooting.md"
BEGIN = "<!-- docs/mistakes.py writes what follows, from tests/real/mistakes.py -->\n"
END = "<!-- docs/mistakes.py wrote this -->\n"
HEAD = """
## Mistakes in training code

A test makes each of these mistakes on purpose, so this is what you see.

| | |
|---|---|
| works | what was meant happens |
| warning | the driver shows once what is wrong, at which line, and the remedy |
| error | the run ends |
| not seen | it cannot be known; the reason follows |
"""
_RESULTS = {"works": "works", "warned": "warning", "error": "error", "unknown": "not seen"}


def _row(name: str, mistake: Mistake) -> str:
    quoted = mistake.result in ("warned", "error")
    text = f"“{mistake.text}”" if quoted else mistake.text
    return f"| {name}: {mistake.code} | **{_RESULTS[mistake.result]}** {text} | {mistake.remedy} |"


def listed() -> str:
    """The list of mistakes, as Markdown."""
    parts = [HEAD]
    for title, mistakes in SECTIONS.items():
        parts.append(f"\n### {title}\n\n| mistake | what happens | remedy |\n|---|---|---|\n")
        parts += [f"{_row(name, mistake)}\n" for name, mistake in mistakes.items()]
    return "".join(parts) + "\n"


def page(text: str) -> str:
    """A page with the list between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{listed()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
