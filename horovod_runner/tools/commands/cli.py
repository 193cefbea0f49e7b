"""The `horovod-runner` command: parses its arguments, and calls what they name.

A command is the module of its name. Its function ``add`` adds the command's parser, whose default
``command`` takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from horovod_runner import __version__
from horovod_runner.common.arguments import did_you_mean, meant
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.sinks.streams import escape_unknown_characters

#: In the order of the help.
_COMMANDS: Final = (
    *("run", "ps", "stop", "top", "report", "trace", "install", "doctor", "verify", "migrate"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for an error, 2 for wrong usage.

    The status of ``run`` is that of the training, see
    :func:`horovod_runner.tools.commands.run.run`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    escape_unknown_characters()
    # Arguments after the first "--" belong to the training, whatever they look like.
    split = given.index("--") if "--" in given else len(given)
    # The others would only cost time.
    root, commands = parsers(*(name for name in given[:1] if name in _COMMANDS))
    options, strays = root.parse_known_args(given[:split])
    if strays:
        from horovod_runner.tools.commands import run_options

        text = f"unknown arguments: {' '.join(strays)}."
        text += run_options.suggest_flags(strays, commands[options.name])
        if options.name == "run":
            text += (
                " Arguments of the training go after a -- at the end of the command: "
                f"-- {' '.join(strays)}"
            )
            print(f"horovod-runner run: {text}", file=sys.stderr)
            return 2
        root.error(text)
    options.arguments = given[split + 1 :]
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended this process
    except HorovodRunnerError as error:
        print(f"horovod-runner: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # --al is not --all

    def error(self, message: str) -> NoReturn:
        """Exit; of a wrong choice, say which one was probably meant."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w-]+", found[2])
            message += f".{did_you_mean(meant(found[1], choices))}"
        super().error(message)


def parsers(
    *names: str,
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The argument parser, and those of some commands; a page of the docs is made from all."""
    root = _Parser(prog="horovod-runner", description="Horovod on Spark and on one machine.")
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(required=True, dest="name", metavar="COMMAND")
    for name in names or _COMMANDS:
        import_module(f"{__package__}.{name}").add(commands)
    return root, commands.choices


if __name__ == "__main__":
    sys.exit(main())
