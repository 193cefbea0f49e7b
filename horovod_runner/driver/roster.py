"""Who takes part in an attempt: the tasks that reported, their ranks, and the ranks' processes."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from horovod_runner.common.slots import Controller, Offer, RankInfo, Slot
from horovod_runner.common.text import names_text, ranks_text
from horovod_runner.driver import placement
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host import software
from horovod_runner.results.failures import lost_error
from horovod_runner.wire import messages
from horovod_runner.wire.job import Job
from horovod_runner.wire.measurements import Machine
from horovod_runner.worker.startup.pmi import process_mapping


class Roster:
    """The tasks and ranks of one attempt.

    Attributes:
        slots: each rank's, in the order of ranks; empty until all tasks have reported.
        pids: the process id of each rank's worker, once it runs.
        machines: the last measurement of the machine under each rank.
        mpi_values: what the ranks' MPI processes have published for each other.
    """

    def __init__(self, job: Job, notice: Callable[[str], None]) -> None:
        self._job = job
        self._notice = notice
        self.hellos: dict[int, messages.Hello] = {}
        self.slots: list[Slot] = []
        self.ranks: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.machines: dict[int, Machine] = {}
        self.mpi_values: dict[str, str] = {}
        self._fenced: set[int] = set()
        self._cold: dict[int, str] = {}
        self._why_controller = ""

    @property
    def complete(self) -> bool:
        """Whether all tasks have reported."""
        return len(self.hellos) == self._job.size

    @property
    def missing(self) -> list[int]:
        """The tasks that have not reported."""
        return sorted(set(range(self._job.size)) - set(self.hellos))

    def choose_controller(self) -> Controller:
        """What Horovod coordinates with; also compares versions, and warns where they differ.

        Raises:
            LaunchError: the hosts' software does not fit together.
        """
        hosts = {hello.offer.hostname: hello.software for hello in self.hellos.values()}
        for warning in software.compare(self._job.software, hosts, self._job.main):
            self._notice(warning)
        controller, self._why_controller = software.choose_controller(
            self._job.controller, hosts, self._memory()
        )
        return controller

    def _memory(self) -> dict[str, software.SharedMemory]:
        offers = [hello.offer for hello in self.hellos.values()]
        ranks = Counter(offer.host for offer in offers)
        return {
            offer.hostname: software.SharedMemory(offer.shared_memory, ranks[offer.host])
            for offer in offers
        }

    def place(self, controller: Controller) -> Iterator[messages.Assignment]:
        """Give each task its rank, and yield what it is to be told.

        Raises:
            GpuError: a host has too few GPUs.
            LaunchError: hosts cannot reach each other.
        """
        offers = [hello.offer for hello in self.hellos.values()]
        hide_gpus = self._hides_gpus(offers)
        gpus_per_rank = 0 if hide_gpus else self._job.options.gpus_per_rank
        self.set_slots(placement.assign(offers, gpus_per_rank))
        if controller == "gloo":
            for warning in placement.short_of_ports(self.slots, offers):
                self._notice(warning)
        first = self.hellos[0]
        pieces = {
            name: [self.hellos[slot.task].pieces[name] for slot in self.slots]
            for name in first.pieces
        }
        space, mapping = secrets.token_hex(8), process_mapping(self.slots)
        hosts = {host: at for at, host in enumerate(dict.fromkeys(s.host for s in self.slots))}
        for slot in self.slots:
            yield messages.Assignment(
                slot,
                first.rendezvous,
                first.offer.address,
                first.master_port,
                pieces,
                controller,
                space,
                mapping,
                hosts[slot.host],
                hide_gpus,
            )

    def _hides_gpus(self, offers: Sequence[Offer]) -> bool:
        """Whether the ranks train on CPUs beside GPUs; if Horovod cannot use them, says so."""
        if self._job.options.gpus_per_rank is not None:
            return self._job.options.gpus_per_rank == 0
        with_gpus = {offer.hostname for offer in offers if offer.host_gpus or offer.task_gpus}
        hosts = {hello.offer.hostname: hello.software for hello in self.hellos.values()}
        names = [n for n in software.without_nccl(hosts, self._job.main) if n in with_gpus]
        if names:
            self._notice(
                f"{names_text('host', names)} {'has' if len(names) == 1 else 'have'} GPUs, and a "
                "Horovod that was built without NCCL: the ranks train on CPUs. To use the GPUs, "
                "run there: horovod-runner install --gpu --rebuild. It says what is missing, for "
                "example the CUDA toolkit. If main does not reduce with Horovod, but with "
                "torch.distributed, set gpus_per_rank=1."
            )
        return bool(names)

    def set_slots(self, slots: list[Slot]) -> None:
        """Set the slots of the ranks."""
        self.slots = slots
        self.ranks = {slot.task: slot.rank for slot in slots}

    def host_of(self, rank: int) -> str:
        """The host of a rank; empty before the ranks have places."""
        return self.slots[rank].host if rank < len(self.slots) else ""

    def started(self, message: messages.Started) -> bool:
        """Record that a rank's worker runs; returns whether that is new."""
        if message.rank in self.pids:
            return False
        self.pids[message.rank] = message.pid
        if message.cold:
            self._cold[message.rank] = message.cold
        return True

    @property
    def all_started(self) -> bool:
        """Whether the workers of all ranks run."""
        return len(self.pids) == self._job.size

    def describe(self) -> str:
        """A table of the ranks for people, and how they coordinate."""
        return f"{placement.describe(self.slots, self.pids)}\n{self._why_controller}"

    def describe_start(self) -> str:
        """Whether the workers were forked from preloaded processes, and why some were not."""
        if not self._cold:
            return "start: warm"
        reasons = "; ".join(sorted(set(self._cold.values())))
        return f"start: cold on {ranks_text(sorted(self._cold))} ({reasons})"

    def infos(self, exit_codes: Mapping[int, int | None]) -> list[RankInfo]:
        """The ranks for sinks, with the exit codes of those that have ended."""
        return [
            RankInfo(
                slot.rank,
                slot.hostname,
                self.pids.get(slot.rank),
                tuple(slot.gpus),
                exit_codes.get(slot.rank),
            )
            for slot in self.slots
        ]

    def lost_error(self, tasks: Sequence[int], said: str = "") -> HorovodRunnerError:
        """The exception for tasks that were lost; ``said`` is the launcher's description of it."""
        return lost_error(tasks, self.slots, self.pids, self.machines, said)

    def fence(self, message: messages.Fence) -> bool:
        """Record that a rank's MPI waits at a fence; returns whether all ranks do now."""
        self.mpi_values |= message.values
        self._fenced.add(message.rank)
        if len(self._fenced) < self._job.size:
            return False
        self._fenced.clear()
        return True
