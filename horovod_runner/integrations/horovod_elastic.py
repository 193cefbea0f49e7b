"""Runs code that was written for Horovod Elastic: ``hvd.elastic.run`` and its states.

    commit                  state.save()  ->  what it saved, as a commit of this package
    main is called again    commit  ->  state.restore(), on_reset(), sync()  ->  the function

Horovod keeps the processes of the ranks that are left, and connects them anew. In a run of this
package ``main`` is called again in new processes, so a state comes back from the latest commit.
:mod:`horovod_runner.run.import_hooks` has ``horovod.common.elastic`` patched when it is imported.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from horovod_runner.checkpoints.snapshot import PLAIN
from horovod_runner.errors import CheckpointError, RanksChangedError
from horovod_runner.worker import context
from horovod_runner.worker.api import STATES, commit, is_leaving, load_commit, log_to_driver
from horovod_runner.worker.imports.patches import instead_of


def patch(elastic: Any) -> None:
    """Have the functions of ``horovod.common.elastic`` use the commits of this run."""
    interrupt = elastic.HostsUpdatedInterrupt

    @instead_of(elastic, "run_fn")
    def run_fn(
        plain: Any, func: Callable[..., Any], reset: Callable[[], None]
    ) -> Callable[..., Any]:
        horovods = plain(func, reset)

        @functools.wraps(func)
        def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
            rank = context.current()
            if rank is None:  # that horovodrun started
                return horovods(state, *args, **kwargs)
            try:
                _begin(state, rank)
                return func(state, *args, **kwargs)
            except interrupt as error:
                raise RanksChangedError(
                    f"{error or 'HostsUpdatedInterrupt was raised'}: main ends here, and is "
                    "called again on all ranks"
                ) from error

        return wrapper

    @instead_of(elastic.State, "commit")
    def commit_state(plain: Any, state: Any) -> None:
        rank = context.current()
        if rank is None:
            plain(state)
        else:
            _commit(state, rank, interrupt)

    @instead_of(elastic.State, "check_host_updates")
    def check_host_updates(plain: Any, state: Any) -> None:
        rank = context.current()
        if rank is None:
            plain(state)
        # One rank of each host looks. It keeps what was done since the last commit, as Horovod
        # does. The other ranks of the host notice that it is gone.
        elif rank.local_rank == 0 and is_leaving():
            _commit(state, rank, interrupt)


class _States:
    """The states of this process, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, list[Any]]] = {}  # what each saved last, by its number
        self.steps = 0  # how many commits there were, in all attempts
        self._loaded = False
        self._states: list[Any] = []

    def load(self) -> None:
        """Load the latest commit, once. All ranks call this."""
        if self._loaded:
            return
        self._loaded = True
        loaded = load_commit()
        if loaded is None:
            return
        if not isinstance(loaded.state, dict) or STATES not in loaded.state:
            raise CheckpointError(
                f"the latest commit, of step {loaded.step}, was made by horovod_runner.commit, and "
                "hvd.elastic.run cannot restore it: use state.commit() of hvd.elastic in its place"
            )
        self.saved = loaded.state[STATES]
        self.steps = loaded.step

    def number(self, state: Any) -> int:
        """The number of a state: the same in each attempt."""
        for number, known in enumerate(self._states):
            if known is state:
                return number
        self._states.append(state)
        return len(self._states) - 1


_states = _States()


def _begin(state: Any, rank: context.RankContext) -> None:
    """Bring a state to where the training goes on, the same on all ranks."""
    if rank.commits:
        _states.load()
        saved = _states.saved.get(_states.number(state))
        if saved is not None:
            _put(state, saved)
            state.restore()
        if rank.attempt > 1:
            state.on_reset()
    elif rank.rank == 0:
        log_to_driver(
            "HorovodRunner: hvd.elastic.run calls its function once, because np is a fixed number "
            "of ranks. A range such as np=(2, 8), with max_restarts=5, makes the run elastic."
        )
    state.sync()


def _commit(state: Any, rank: context.RankContext, interrupt: Any) -> None:
    """Save a state, and keep it in the memory of each host; ``interrupt`` if the ranks change."""
    before = dict(vars(state))
    state.save()
    if not rank.commits:
        return
    _states.steps += 1
    kept: dict[str, Any] = {}
    if rank.local_rank == 0:  # the others do not write
        _states.saved[_states.number(state)] = _saved(state, before)
        kept = {STATES: _states.saved}
    try:
        commit(kept, _states.steps)
    except RanksChangedError as error:
        changed = interrupt(False)
        changed.args = (f"the ranks change after commit {_states.steps}",)
        raise changed from error


def _places(state: Any) -> Iterator[tuple[str, Any]]:
    """The objects whose attributes ``save`` sets: the state, and torch's handlers by name."""
    yield "", state
    yield from getattr(state, "_handlers", {}).items()


def _saved(state: Any, before: MutableMapping[str, Any]) -> dict[str, list[Any]]:
    """What ``save`` has kept: path -> value, or a pickle of it; ``before``: attributes before."""
    found: dict[str, list[Any]] = {}
    for place, owner in _places(state):
        for name, value in vars(owner).items():
            if place:
                wanted = name != "value"  # which is the model itself
            else:
                changed = name not in before or value is not before[name]
                wanted = name.startswith("_saved") or changed
            if wanted and name == "_saved_state":  # the user's own attributes
                for attribute, own in value.items():
                    found[f"{place}/{name}/{attribute}"] = _packed(own, own=True)
            elif wanted:
                found[f"{place}/{name}"] = _packed(value)
    return found


def _put(state: Any, saved: MutableMapping[str, list[Any]]) -> None:
    """Set the attributes that ``restore`` reads."""
    owners = dict(_places(state))
    for path, (kind, value) in saved.items():
        place, name, *attribute = path.split("/", 2)
        if kind == "pickle":
            import cloudpickle

            value = cloudpickle.loads(value)  # noqa: PLW2901 - from a rank of this run
        if place not in owners:
            raise CheckpointError(
                f"the commit holds {place!r}, which this state does not have: main must make the "
                "same hvd.elastic states each time it is called"
            )
        if attribute:
            getattr(owners[place], name)[attribute[0]] = value
        else:
            setattr(owners[place], name, value)


def _packed(value: Any, *, own: bool = False) -> list[Any]:
    """A value as it is stored: as it is, or else pickled."""
    if _is_plain(value, own):
        return ["", value]
    import cloudpickle

    return ["pickle", cloudpickle.dumps(value)]


def _is_plain(value: Any, own: bool) -> bool:
    """Whether a commit can store a value as it is, and gives it back with the same types.

    ``own``: it is an attribute of the user's. A state dict may come back on the CPU.
    """
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind in (dict, OrderedDict):
        return all(type(key) in PLAIN and _is_plain(item, own) for key, item in value.items())
    if kind in (list, tuple):
        return all(_is_plain(item, own) for item in value)
    return _is_plain_array(value, own)


def _is_plain_array(value: Any, own: bool) -> bool:
    kind = type(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return not value.dtype.hasobject
    if torch is not None and isinstance(value, torch.Tensor):
        on_cpu = value.device.type == "cpu"
        return not own or (kind is torch.Tensor and on_cpu and not value.requires_grad)
    if torch is not None and kind in (torch.dtype, torch.device):
        return True
    return not own and kind.__module__.startswith("tensorflow.") and hasattr(value, "numpy")
