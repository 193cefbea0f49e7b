"""The class in front of a Keras optimizer's own class, which reduces gradients.

Keras 3 calls ``_clip_gradients`` once per update of the weights: after gradients were accumulated,
and before they are clipped and weights decay. Gradients are reduced there. The optimizer object and
its state stay the same, and Keras saves it as the plain optimizer.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import keras

from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.reduction import Completed, Reduction
from horovod_runner.worker.api import check_weights

_numbers = defaultdict[int, Iterator[int]](lambda: itertools.count(1))  # by process set


class Variables(list[Any]):
    """The variables of an optimizer; older code calls the attribute: ``optimizer.variables()``."""

    def __call__(self) -> Variables:
        return self


class _Unused:
    """Variables that this rank has no gradient for, and the optimizer's variables of them.

    ``shared`` has the positions of the variables that ranks share, ``completed`` their gradients.
    """

    def __init__(self, shared: Sequence[int] = (), completed: Completed | None = None) -> None:
        self._shared = shared
        self._completed = completed
        self._kept: list[tuple[int, Any, Any]] = []

    @property
    def alike(self) -> Any:
        """See :class:`~horovod_runner.integrations.keras.reduction.Completed`."""
        return None if self._completed is None else self._completed.alike

    def keep(self, number: int, variables: Iterable[Any]) -> None:
        """Remember the values of variables, which belong to the shared one of a number."""
        self._kept += [(number, variable, keras.ops.copy(variable)) for variable in variables]

    def positions(self) -> list[int]:
        """The positions of the variables that no rank has a gradient for; not in a graph."""
        if self._completed is None:
            return []
        counts = keras.ops.convert_to_numpy(self._completed.ranks())
        return [p for p, count in zip(self._shared, counts, strict=True) if not count]

    def put_back(self) -> None:
        """Give variables that no rank has a gradient for their values: one process leaves them."""
        if self._completed is None:
            return
        counts = self._completed.ranks()
        for number, variable, value in self._kept:
            variable.assign(keras.ops.where(counts[number] > 0, variable, value))
        self._kept = []


class Distributed:
    """A mixin in front of the class of a Keras optimizer."""

    # Keras's own.
    _var_key: Callable[[Any], Hashable]
    _trainable_variables: Sequence[Any]
    gradient_accumulation_steps: Any
    learning_rate: Any

    _reduction: Reduction
    _sums_passes: bool
    _name_from_user: str | None
    _local: dict[Hashable, Any]  # variables whose gradients stay on their rank
    _scales_local: bool
    _slots: list[tuple[Any, Hashable]]  # state that Keras keeps for a variable, and its key
    _reduction_name: str | None = None
    _shows_plain: bool
    _unreduced = 0
    _keys: tuple[Hashable, ...] = ()  # of the variables of the gradients that Keras passes on
    _unused = _Unused()  # of the step
    _reduced_in: Any = None  # where compute_gradients has reduced the next gradients

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras writes this class to a file: the plain optimizer's, which loads without this module.
        # torch.compile asks for it, too, and would leave out this class, which has the same name.
        return type(self).__mro__[2 if self._shows_plain else 0]

    @property
    def variables(self) -> Variables:
        return Variables(super().variables)  # type: ignore[misc]

    @property
    def lr(self) -> Any:
        """Keras 2's name; without it Keras 3 would accept ``optimizer.lr = x`` and ignore it."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradients of a variable on their rank: they are not averaged.

        Args:
            variable: a trainable variable.

        Raises:
            TypeError: it is not a variable.
        """
        if not hasattr(variable, "assign"):
            raise TypeError(f"register_local_var needs a variable, not {variable!r}")
        self._local[self._var_key(variable)] = variable

    def shared_variables(self, variables: Iterable[Any]) -> list[Any]:
        """Return those of the variables that must be equal on all ranks."""
        if self._reduction.process_set is not None:
            return []
        return [v for v in variables if self._var_key(v) not in self._local]

    def slots_of(self, variables: Iterable[Any]) -> list[Any]:
        """Return the optimizer's own variables that belong to some of the model's variables."""
        keys = {*map(self._var_key, variables)}
        return [slot for slot, key in self._slots if key in keys]

    def add_variable_from_reference(
        self, reference_variable: Any, *args: Any, **options: Any
    ) -> Any:
        slot = super().add_variable_from_reference(  # type: ignore[misc]
            reference_variable, *args, **options
        )
        self._slots.append((slot, self._var_key(reference_variable)))
        return slot

    def compute_gradients(
        self, loss: Any, var_list: Sequence[Any], tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Compute gradients on TensorFlow, and reduce them over the ranks.

        ``apply_gradients``, called next, does not reduce them a second time.

        Args:
            loss: a function that returns the loss, or a tensor that ``tape`` has recorded.
            var_list: the variables to differentiate by.
            tape: a ``tf.GradientTape``; None makes one.

        Returns:
            Pairs of a gradient and its variable.

        Raises:
            ValueError: ``loss`` is a tensor, and there is no tape.
            NotImplementedError: Keras's backend is torch.
        """
        variables = list(var_list)
        gradients = collectives().differentiate(loss, variables, tape)
        return list(zip(self._reduce_now(gradients, variables), variables, strict=True))

    def _compute_gradients(
        self, loss: Any, var_list: Sequence[Any], grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        # Keras 2 has this name, and so do scripts of Horovod's.
        del grad_loss
        return self.compute_gradients(loss, var_list, tape)

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Return the gradients of :meth:`compute_gradients` without their variables."""
        return [gradient for gradient, _ in self.compute_gradients(loss, params)]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        # Keras 2's argument: with False the gradients are reduced already.
        if not options.pop("experimental_aggregate_gradients", True):
            self._set("_reduced_in", collectives().graph())
        return super().apply_gradients(grads_and_vars, *args, **options)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        gradients = list(grads)
        reduced_in, graph = self._reduced_in, collectives().graph()
        if reduced_in is not None and reduced_in != graph:
            self._set("_reduced_in", None)
            raise RuntimeError(
                "compute_gradients was called in another tf.function than apply_gradients, so that "
                "the gradients would be reduced twice: call both in the same tf.function, or both "
                "outside of one"
            )
        self._unreduced += 1
        own = self._trainable_variables
        variables = list(own if trainable_variables is None else trainable_variables)
        gradients, unused = self._with_zeros(gradients, variables)
        self._set("_unused", unused)
        super().apply(gradients, trainable_variables)  # type: ignore[misc]
        unused.put_back()
        self._set("_reduced_in", None)
        if self._unreduced < (self.gradient_accumulation_steps or 1):
            return
        self._unreduced = 0
        if gradients and collectives().hvd.size() > 1:
            raise RuntimeError(
                f"Keras {keras.__version__} updated the weights without averaging the gradients "
                f"over the ranks ({type(self).__name__} did not call _clip_gradients). This "
                "version of horovod_runner does not support this version of Keras: change one of "
                "them."
            )

    def finalize_variable_values(self, var_list: Any) -> None:
        """Compare the ranks' weights at the end of ``model.fit``, also without callbacks."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]
        if shared := self.shared_variables(var_list):
            check_weights(shared)

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        self._unused.put_back()  # the average is of what the step leaves
        super()._update_model_variables_moving_average(trainable_variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Any) -> None:
        self._set("_keys", tuple(map(self._var_key, trainable_variables)))
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        self._unreduced = 0
        gradients = list(grads)
        if self._sums_passes:
            passes = float(self.gradient_accumulation_steps)
            gradients = collectives().scale(gradients, passes)
        if self._reduced_in is None:
            gradients = self._reduce(gradients, self._keys)
        return super()._clip_gradients(gradients)  # type: ignore[misc]

    def _reduce_now(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients before Keras sees them; None stays where no rank has one.

        In a graph, where that is not known, it becomes zeros.
        """
        filled, unused = self._with_zeros(list(gradients), list(variables))
        self._set("_unused", unused)
        none = unused.positions() if collectives().graph() == "eager" else []
        reduced = [None if position in none else g for position, g in enumerate(filled)]
        there = [position for position, g in enumerate(reduced) if g is not None]
        keys = [self._var_key(variables[position]) for position in there]
        results = self._reduce([reduced[position] for position in there], keys)
        for position, gradient in zip(there, results, strict=True):
            reduced[position] = gradient
        self._set("_reduced_in", collectives().graph())
        return reduced

    def _with_zeros(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], _Unused]:
        """Replace gradients that this rank lacks by zeros: another rank may have them.

        Keras leaves variables without a gradient out, as those of a layer that this rank has not
        used, and reductions are numbered.
        """
        backend, how = collectives(), self._reduction
        keys = [*map(self._var_key, variables)]
        shared = [position for position, key in enumerate(keys) if key not in self._local]
        is_reduced = self._reduced_in is not None or len(gradients) != len(variables)
        if is_reduced or not shared or how.size(backend.hvd) == 1:
            return gradients, _Unused()
        name = self._name_of_reduction()
        completed = backend.complete(
            [gradients[each] for each in shared], [variables[each] for each in shared], name, how
        )
        unused = _Unused(shared, completed)
        for number, position in enumerate(shared):
            if gradients[position] is None:
                variable = variables[position]
                gradients[position] = completed.gradients[number]
                # Keras drops a gradient of an earlier pass where the last pass has none.
                sums = {id(each) for each in getattr(self, "_accumulated_gradients", ())}
                slots = [s for s in self.slots_of([variable]) if id(s) not in sums]
                unused.keep(number, [variable, *slots])
        return gradients, unused

    def _reduce(self, gradients: list[Any], keys: Sequence[Hashable]) -> list[Any]:
        """Reduce gradients over the ranks, except those of local variables."""
        backend, how = collectives(), self._reduction
        size = how.size(backend.hvd)
        if size == 1:
            return gradients
        reduced = list(gradients)
        shared = [position for position, key in enumerate(keys) if key not in self._local]
        if shared:
            groups = how.partition([keys[position] for position in shared])
            sent = [gradients[position] for position in shared]
            name, alike = self._name_of_reduction(), self._unused.alike
            results = backend.reduce_gradients(sent, name, how, groups, alike)
            for position, gradient in zip(shared, results, strict=True):
                reduced[position] = gradient
        local = set(range(len(keys))) - set(shared) if self._scales_local else ()
        for position in local:
            (reduced[position],) = backend.scale([gradients[position]], 1.0 / size)
        return reduced

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute that Keras must not track as a part of the optimizer's state."""
        object.__setattr__(self, name, value)

    def _name_of_reduction(self) -> str:
        # Numbered in the order of first use, which is the same on all ranks of a process set.
        if self._reduction_name is None:
            ranks = self._reduction.process_set
            number = 0 if ranks is None else ranks.process_set_id
            where = f"set{number}." if number else ""
            name = f"DistributedOptimizer.{where}{next(_numbers[number])}"
            self._reduction_name = self._name_from_user or name
        return self._reduction_name


def make_distributed(optimizer: Any, settings: dict[str, Any]) -> None:
    """Change the class of an optimizer, in place, to one that reduces."""
    plain = type(optimizer)
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    members = {**names, **settings, "_shows_plain": keras.backend.backend() != "torch"}
    distributed = type(plain.__name__, (Distributed, plain), members)
    package, is_registered, name = keras.saving.get_registered_name(plain).rpartition(">")
    if is_registered:
        for each in (distributed, plain):  # both have the name, which stands for the plain class
            keras.saving.register_keras_serializable(package, name)(each)
    object.__setattr__(optimizer, "__class__", distributed)
