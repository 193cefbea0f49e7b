"""Write docs/reference/cli.md from the help of the commands.

python docs/command_line.py > docs/reference/cli.md
"""

from __future__ import annotations

import os

from horovod_runner.tools.commands.cli import parsers

HEAD = """# Command line

Use `horovod-runner` to run a script or function as ranks from a shell, to list, watch and end runs,
to build Horovod, to check a machine, and to change old code:

```sh
horovod-runner install                                  # build Horovod for what is installed
horovod-runner doctor                                   # two ranks say hello
horovod-runner doctor --path s3://bucket/checkpoints    # try a folder for checkpoints
horovod-runner verify -o report.html                    # check what the docs say about GPUs
horovod-runner run train.py --np -2 -- --lr 0.1         # two ranks on this machine
horovod-runner run train.py --np 8 --master spark://host:7077 --max-restarts 2
horovod-runner ps
horovod-runner top                                      # how far they are, how their time goes
horovod-runner migrate old.ipynb                        # what has changed since it was written
```

The options of `run` are the arguments of `HorovodRunner` and its configs, with dashes
([Python API](api.md)). What [checkpoints](../howto/checkpoints.md), [GPUs](../howto/gpu.md) and
[failures](failures.md) say about HorovodRunner also applies to `horovod-runner run`.

<!-- docs/command_line.py makes this page from the commands' help. -->
"""


def page() -> str:
    """The text of docs/reference/cli.md."""
    os.environ["COLUMNS"] = "100"  # the width of the help texts
    root, commands = parsers()
    blocks = [HEAD, f"```text\n{root.format_help()}```\n"]
    for name, command in commands.items():
        blocks.append(f"## horovod-runner {name}\n\n```text\n{command.format_help()}```\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    print(page(), end="")
