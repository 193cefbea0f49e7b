"""What a run is doing now: pure arithmetic on what was heard of its ranks."""

from __future__ import annotations

import time

import msgspec
import pytest

from horovod_runner.common.text import bytes_text, duration_text, rate_text
from horovod_runner.results.live import MAX_LINES, MAX_METRICS, MAX_RANKS, live
from horovod_runner.results.metrics_table import Metrics
from horovod_runner.results.run import Attempt, Line
from horovod_runner.wire.events import Report
from tests.made_up_runs import STEPS, run_under_way, window


def test_a_run_says_how_far_it_is_and_where_its_time_goes() -> None:
    now = live(run_under_way(4, slow=3))
    assert (now.status, now.size, now.attempt, now.restarts) == ("running", 4, 1, 0)
    assert (now.step, now.total_steps, now.epoch) == (341, 1200, 2)
    assert now.metrics == {"loss": 0.25}
    assert now.elapsed == pytest.approx(30, abs=20)
    assert now.rate == pytest.approx(STEPS)
    assert now.memory == 8_000_000_000
    slow = now.ranks[3]
    assert (slow.rank, slow.host, slow.pid) == (3, "host-0", 4003)
    assert slow.shares is not None
    assert msgspec.structs.astuple(slow.shares) == pytest.approx((0.74, 0.2, 0, 0.05, 0.01))
    assert (slow.cpu, slow.memory) == (pytest.approx(1.5), 2_000_000_000)
    assert (slow.host_cores, slow.of_cores) == (13.25, 16)
    assert now.shares is not None
    assert now.shares.waiting == pytest.approx(0.3)
    assert now.verdict.startswith("Rank 3 is last in 100% of the collectives")
    assert "\n" not in now.verdict


def test_a_thousand_ranks_are_the_slowest_and_the_others() -> None:
    now = live(run_under_way(1000, seconds=3, slow=777))
    assert now.size == 1000
    assert len(now.ranks) == MAX_RANKS
    assert now.ranks[0].rank == 777
    assert now.others is not None
    assert now.others.count == 1000 - MAX_RANKS
    assert now.others.rate == pytest.approx(STEPS)
    assert now.others.shares is not None
    assert now.others.shares.waiting == pytest.approx(0.4)
    packed = msgspec.msgpack.encode(now)
    assert len(packed) < 10_000
    assert msgspec.msgpack.decode(packed, type=type(now)) == now


def test_now_is_the_last_seconds_and_not_the_whole_run() -> None:
    run = run_under_way(2, seconds=6)
    for second in range(6, 12):
        run.profile.add(window(0, second, 0.7))
    (rank, _) = live(run).ranks
    assert rank.shares is not None
    assert rank.shares.waiting == pytest.approx(0.7)


def test_slow_steps_are_counted_over_more_seconds() -> None:
    run = run_under_way(1, seconds=0)
    for second in range(60):
        steps = {"optimizer": 1} if second % 8 == 0 else {}
        run.profile.add(msgspec.structs.replace(window(0, second, 0.0), steps=steps))
    assert live(run).rate == pytest.approx(1 / 8, rel=0.2)


def test_a_rank_that_sends_nothing_makes_no_steps() -> None:
    run = run_under_way(2)
    run.profile._heard[1] -= 22.0
    rank = live(run).ranks[1]
    assert rank.silent == pytest.approx(22, abs=1)
    assert rank.rate == pytest.approx(1 / 20, rel=0.05)


def test_waits_of_the_second_before_do_not_make_more_than_all_of_the_time() -> None:
    run = run_under_way(1, seconds=0)
    run.profile.add(window(0, 0, 1.74))
    (rank,) = live(run).ranks
    assert rank.shares is not None
    assert sum(msgspec.structs.astuple(rank.shares)) == pytest.approx(1.0)
    assert rank.shares.waiting == pytest.approx(0.87)


def test_summaries_of_an_earlier_attempt_do_not_count() -> None:
    run = run_under_way(2)
    run.attempts[0].error = "RankFailedError: rank 1 of 2"
    run.attempts.append(Attempt(2, time.time() + 1))
    now = live(run)
    assert (now.attempt, now.restarts, now.error) == (2, 1, "RankFailedError: rank 1 of 2")
    assert now.rate is None
    assert now.shares is None


def test_a_machine_is_shown_before_the_first_step() -> None:
    run = run_under_way(2, seconds=0)
    rank = live(run).ranks[1]
    assert (rank.memory, rank.cores, rank.rate) == (2_000_000_000, "13.2/16", None)
    run.attempts.append(Attempt(2, time.time() + 1))
    assert live(run).memory is None


def test_steps_that_nobody_reports_are_counted() -> None:
    run = run_under_way(2, seconds=6)
    run._metrics = Metrics()
    assert live(run).step == 6 * STEPS


def test_the_last_step_of_a_finished_run_is_its_number_of_steps() -> None:
    run = run_under_way(2)
    run._metrics.extend([Report(0, {}, step=1199)], 1)
    assert live(run).step == 1199
    run.status = "finished"
    assert live(run).step == 1200


def test_few_metrics_are_kept() -> None:
    run = run_under_way(1)
    run._metrics.extend([Report(0, {f"metric {n}": n for n in range(50)})], 1)
    assert len(live(run).metrics) == MAX_METRICS
    assert live(run).step == 341  # of the report before


def test_the_last_lines_are_plain_text_and_say_who_printed_them() -> None:
    run = run_under_way(2)
    run._lines.extend(
        [
            Line(
                0.0, 1, "stderr", "\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\x07!\n"
            ),
            Line(0.0, 0, "stdout", " 10%|#\r 20%|##\r"),
            Line(0.0, 0, "log", "two\nlines"),
            Line(0.0, -1, "notice", "rank 1 is slow"),
            Line(0.0, 0, "stdout", "x" * 10_000),
        ]
    )
    *lines, long = live(run).lines
    assert len(lines) == MAX_LINES - 1
    assert lines[-5:] == [
        "[1] red link!",
        "[0]  20%|##",
        "two",
        "lines",
        "HorovodRunner: rank 1 is slow",
    ]
    assert len(long) < 500


def test_a_verdict_is_kept_for_some_seconds() -> None:
    run = run_under_way(2, slow=1)
    run._verdict = "as before", time.monotonic() + 1000
    assert live(run).verdict == "as before"
    run.status = "finished"
    assert live(run).verdict.startswith("Rank 1 is last")


def test_numbers_are_for_people() -> None:
    seconds = (0.4, 59.6, 185, 2 * 3600 + 780, 4 * 86400 + 3700)
    assert [duration_text(each) for each in seconds] == [
        "0 s",
        "1 min 0 s",
        "3 min 5 s",
        "2 h 13 min",
        "4 d 1 h",
    ]
    assert [rate_text(each) for each in (0.03125, 19.44, 1234.5)] == ["0.0312", "19.4", "1,234"]
    assert [bytes_text(each) for each in (12, 3.4e9, 1.25e12)] == ["12 bytes", "3.4 GB", "1.2 TB"]
