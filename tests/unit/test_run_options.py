"""The command line's options are Python's."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.common import options
from horovod_runner.tools.commands import run_options


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    run_options.add(parser)
    return run_options.chosen(parser.parse_args(arguments))


def test_the_defaults_are_those_of_python() -> None:
    found = options.grouped({"np": 1, **parse()})
    chosen = options.Options(**found)
    expected = options.Options(np=1, driver_log_verbosity="all")
    assert chosen == expected


def test_every_option_that_is_no_object_can_be_given() -> None:
    left_out = {"np", "sinks", "spark", "resource_profile", "launcher", "limits", *options.GROUPS}
    kinds = (options.Options, *options.GROUPS.values())
    expected = {each.name for kind in kinds for each in fields(kind)} - left_out
    assert set(parse()) == expected


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--hang-timeout", "7.5"], "hang_timeout", 7.5),
        (["--hang-timeout", "none"], "hang_timeout", None),
        (["--num-to-keep", "2"], "num_to_keep", 2),
        (["--num-to-keep", "none"], "num_to_keep", None),
        (["--metric", "loss"], "metric", "loss"),
        (["--report-ranks", "0"], "report_ranks", 0),
        (["--report-ranks", "all"], "report_ranks", "all"),
        (["--weight-check", "epoch"], "weight_check", "epoch"),
        (["--weight-check", "None"], "weight_check", None),
        (["--preload-frameworks"], "preload_frameworks", True),
        (["--no-progress"], "progress", False),
        (["--resume"], "resume", True),
        (["--env", "A=1", "--env", "B=x=y"], "env", {"A": "1", "B": "x=y"}),
        (["--ship-modules", "a, b.c"], "ship_modules", ["a", "b.c"]),
        (["--gpus-per-rank", "0.5"], "gpus_per_rank", 0.5),
        (["--gpu"], "gpus_per_rank", 1.0),
        (["--cpu"], "gpus_per_rank", 0.0),
        (["--cpu-collectives", "gloo"], "cpu_collectives", "gloo"),
        (["--slot-timeout", "3"], "slot_timeout", 3.0),
        (["--torch-profiler", "true"], "torch_profiler", True),
        (["--torch-profiler", "profiles"], "torch_profiler", "profiles"),
    ],
)
def test_a_value_arrives_as_in_python(arguments: list[str], name: str, value: object) -> None:
    assert parse(*arguments)[name] == value


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hang-timeout", "soon"],
        ["--report-ranks", "1"],
        ["--cpu-collectives", "tcp"],
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)


def test_the_help_is_the_docstring() -> None:
    parser = argparse.ArgumentParser()
    run_options.add(parser)
    text = " ".join(parser.format_help().split())
    assert "seconds without progress after which the run ends with a HangError" in text
    assert "(default: 1800.0) (none: no limit)" in text


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"'keep'.*num_to_keep"):
        options.grouped({"keep": 3})


def test_options_are_grouped_with_what_a_group_has_already() -> None:
    given = options.DebugConfig(report_ranks="all")
    found = options.grouped({"np": 1, "debug_config": given, "hang_timeout": 5.0})
    assert found == {
        "np": 1,
        "debug_config": options.DebugConfig(report_ranks="all", hang_timeout=5.0),
    }


@pytest.mark.parametrize(
    ("np", "error", "said"),
    [
        ((2,), ValueError, r"^np .*pair.*\(2,\)$"),
        ((4, 2), ValueError, r"np=\(2, 4\)"),
        ((-4, -2), ValueError, r"np=\(-2, -4\)"),
        ((-2, 4), ValueError, r"np=\(-2, 4\): both"),
        ((0, 4), ValueError, r"np=\(0, 4\): both"),
        ((2, 4.0), TypeError, r"^np .*\(2, 4\.0\)"),
    ],
)
def test_ranges_of_np_that_make_no_sense_are_refused(np: object, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        HorovodRunner(np=np)


def test_a_range_of_np_on_the_command_line() -> None:
    assert run_options.ranks_or_range("2:8") == (2, 8)
    assert run_options.ranks_or_range("-2:-8") == (-2, -8)
    assert run_options.ranks_or_range("-3") == -3
    with pytest.raises(argparse.ArgumentTypeError, match=r"'2:many' .*LEAST:MOST"):
        run_options.ranks_or_range("2:many")
