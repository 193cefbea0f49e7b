"""Writes docs/cli.md from the commands' own help.

python docs/command_line.py > docs/cli.md
"""

from __future__ import annotations

import argparse
import os

from horovod_runner.cli import parser

HEAD = """# Command line

Made from the commands' own help by `python docs/command_line.py`.

Ranks that `horovod-runner run` starts are HorovodRunner's: what [checkpoints.md](checkpoints.md),
[gpu.md](gpu.md) and [failures.md](failures.md) say holds for them.
"""


def page() -> str:
    """The whole page."""
    os.environ["COLUMNS"] = "100"  # argparse's width
    root = parser()
    blocks = [HEAD, f"```text\n{root.format_help()}```\n"]
    (commands,) = (
        action for action in root._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, command in commands.choices.items():
        blocks.append(f"## horovod-runner {name}\n\n```text\n{command.format_help()}```\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    print(page(), end="")
