"""JAX: differentiate with `jax.grad`, compile with `jax.jit`, state as arguments. See `window.py`."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_diffusion_opd.data.targets import attach_shared
from keras_diffusion_opd.trainers.checks import add_violations, no_violations, raise_violations, sound

_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


class BackendWindow:
    """The JAX half of `WindowTrainer`."""

    # The rest of the trainer, as this half sees it.
    micro_batch: Any
    updated: Any
    violation_messages: Any
    gradient_scale: Any
    mean_gradients: Any
    sum_dtype: Any
    weight_dtype: Any
    optimizer: Any
    metrics: Any
    metrics_variables: Any
    trainable_variables: Any
    non_trainable_variables: Any
    get_metrics_result: Any
    on_empty: str
    steps_per_execution: int
    jit_compile: bool
    run_eagerly: bool
    jax_state_sync: Any
    window_done: Any

    # ---- pure functions ------------------------------------------------------------------------------

    def _forward(
        self, tv: list[Any], ntv: list[Any], ov: list[Any] | None, mv: list[Any], data: Any
    ) -> tuple[Any, tuple[dict[str, Any], list[Any], list[Any]]]:
        """Primary sum of one micro-batch, then (violations, new non-trainable and metrics variables).

        Without the optimizer's variables `ov` this is evaluation.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        # Models, loss and metrics read and write variables: inside the scope they are this step's values.
        mapping = [
            *zip(self.trainable_variables, tv, strict=True),
            *zip(self.non_trainable_variables, ntv, strict=True),
            *zip(self.metrics_variables, mv, strict=True),
            *([] if ov is None else zip(self.optimizer.variables, ov, strict=True)),
        ]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            primary, found = self.micro_batch(x, y, sample_weight, ov is not None)
        ntv = [scope.get_current_value(v) for v in self.non_trainable_variables]
        mv = [scope.get_current_value(v) for v in self.metrics_variables]
        return primary, (found, ntv, mv)

    def _micro(self, carry: Any, frozen: Any, data: Any, index: Any) -> Any:
        """One micro-batch: `carry` is given away (donated), `frozen` is only read."""
        sums, weight, table, ntv, mv = carry
        tv, ov = frozen

        def objective(tv: list[Any]) -> Any:
            primary, rest = self._forward(tv, ntv, ov, mv, data)
            scale = self.gradient_scale(primary.weight)
            with keras.StatelessScope(state_mapping=list(zip(self.optimizer.variables, ov, strict=True))):
                return self.optimizer.scale_loss(primary.total * scale), (primary.weight, scale, *rest)

        gradients, (added, scale, found, ntv, mv) = jax.grad(objective, has_aux=True)(tv)
        wide = [g.astype(self.sum_dtype(v)) / scale for g, v in zip(gradients, self.trainable_variables, strict=True)]
        sums = wide if sums is None else [a + b for a, b in zip(sums, wide, strict=True)]
        table = add_violations(self.violation_messages(), table, found, index)
        return sums, weight + added.astype(weight.dtype), table, ntv, mv

    def _apply(self, state: Any, sums: list[Any], weight: Any, table: Any) -> Any:
        """The update of the window: divided once, applied once, or not at all."""
        tv, ntv, ov, mv = state
        new_tv, new_ov = self.optimizer.stateless_apply(ov, self.mean_gradients(sums, weight), tv)
        moved = jnp.logical_and(sound(table), jnp.logical_or(weight > 0, self.on_empty == "zero_grad"))
        mapping = [
            *zip(self.trainable_variables, new_tv, strict=True),
            *zip(self.non_trainable_variables, ntv, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.updated()
        new_ntv = [scope.get_current_value(v) for v in self.non_trainable_variables]
        # What `updated` has not touched is the same object, and nothing is computed for it.
        ntv = [old if new is old else jnp.where(moved, new, old) for new, old in zip(new_ntv, ntv, strict=True)]
        tv = [jnp.where(moved, new, old) for new, old in zip(new_tv, tv, strict=True)]
        ov = [jnp.where(moved, new, old) for new, old in zip(new_ov, ov, strict=True)]
        with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, mv, strict=True))):
            logs = self.get_metrics_result()
        return (logs, moved, table), (tv, ntv, ov, mv)

    def _single(self, state: Any, data: Any) -> Any:
        """A window of one micro-batch: no sums are kept beside the gradients."""
        tv, ntv, ov, mv = state
        carry = (None, jnp.zeros((), self.weight_dtype()), self._nothing_found(), ntv, mv)
        sums, weight, table, ntv, mv = self._micro(carry, (tv, ov), data, 0)
        return self._apply((tv, ntv, ov, mv), sums, weight, table)

    def _zero_sums(self, tv: list[Any]) -> list[Any]:
        return [jnp.zeros(v.shape, self.sum_dtype(v)) for v in tv]

    def _nothing_found(self) -> Any:
        return no_violations(self.violation_messages())

    def _evaluate_batch(self, state: Any, data: Any) -> Any:
        tv, ntv, mv = state
        _, (found, ntv, mv) = self._forward(tv, ntv, None, mv, data)
        with keras.StatelessScope(state_mapping=list(zip(self.metrics_variables, mv, strict=True))):
            logs = self.get_metrics_result()
        table = add_violations(self.violation_messages(), self._nothing_found(), found, 0)
        return (logs, table), (tv, ntv, mv)

    # ---- compiled functions ----------------------------------------------------------------------------

    def _jit(self, function: Any, donate: Any = (), out_shardings: Any = None) -> Any:
        if not self.jit_compile or self.run_eagerly:
            return function
        if out_shardings is None or keras.distribution.distribution() is None:
            return jax.jit(function, donate_argnums=donate)
        return jax.jit(function, donate_argnums=donate, out_shardings=out_shardings)

    def _shardings(self) -> Any:
        if keras.distribution.distribution() is None:
            return None, None, None, None
        return self._get_state_sharding_spec()  # type: ignore[attr-defined]

    def make_train_function(self, force: bool = False) -> None:
        """Build `train_function(state, iterator) -> (logs, state)`, one window per call."""
        if getattr(self, "train_function", None) is not None and not force:
            return
        tvs, ntvs, ovs, mvs = self._shardings()
        update = (None, (tvs, ntvs, ovs, mvs))
        single = self._jit(self._single, 0, update)
        apply = self._jit(self._apply, 0, update)
        micro = self._jit(self._micro, 0, (tvs, None, None, ntvs, mvs))
        zeros = self._jit(self._zero_sums, (), tvs)
        k = self.steps_per_execution

        def one(keeper: _Keeper, iterator: Iterator[Any]) -> Any:
            result, keeper.state = single(keeper.state, next(iterator))
            return result

        def several(keeper: _Keeper, iterator: Iterator[Any]) -> Any:
            tv, ntv, ov, mv = keeper.state
            data = next(iterator)
            carry = (zeros(tv), jnp.zeros((), self.weight_dtype()), self._nothing_found(), ntv, mv)
            for index in range(k):
                if index:
                    try:
                        data = next(iterator)
                    except StopIteration:
                        break  # the epoch's last window is short
                carry = micro(carry, (tv, ov), data, index)
                keeper.state = (tv, carry[3], ov, carry[4])
            sums, weight, table, ntv, mv = carry
            result, keeper.state = apply((tv, ntv, ov, mv), sums, weight, table)
            return result

        window = one if k == 1 else several

        def train_function(state: Any, iterator: Iterator[Any]) -> Any:
            keeper, batches = _Keeper(state), map(attach_shared, iterator)
            with_state = keeper.guard(self, lambda: self._finish(window(keeper, batches)))
            return with_state, keeper.state

        self.train_function = train_function

    def _finish(self, result: Any) -> Any:
        logs, moved, table = result
        moved, table = jax.device_get((moved, table))
        raise_violations(self.violation_messages(), np.asarray(table))
        self.window_done(bool(moved))
        return logs

    def pass_over(self, logs: Any, state: Any, iterator: Iterator[Any]) -> Any:
        """In place of `train_function` for a window that was done before: draws its batches, nothing else."""
        _Keeper(state).guard(self, lambda: list(itertools.islice(iterator, self.steps_per_execution)))
        return logs, state

    def make_test_function(self, force: bool = False) -> None:
        """Build `test_function(state, iterator) -> (logs, state)`."""
        if getattr(self, "test_function", None) is not None and not force:
            return
        tvs, ntvs, _, mvs = self._shardings()
        step = self._jit(self._evaluate_batch, 0, (None, (tvs, ntvs, mvs)))
        k = self.steps_per_execution

        def several(keeper: _Keeper, iterator: Iterator[Any]) -> Any:
            logs = None
            for index in range(k):
                try:
                    data = next(iterator)
                except StopIteration:
                    if not index:
                        raise
                    break
                (logs, table), keeper.state = step(keeper.state, data)
                raise_violations(self.violation_messages(), np.asarray(jax.device_get(table)), evaluating=True)
            return logs

        def test_function(state: Any, iterator: Iterator[Any]) -> Any:
            keeper, batches = _Keeper(state), map(attach_shared, iterator)
            logs = keeper.guard(self, lambda: several(keeper, batches))
            return logs, keeper.state

        self.test_function = test_function


class _Keeper:
    """Holds the newest state, and gives it back to the variables when an exception passes.

    While an epoch runs Keras empties the variables; an exception in the first step would leave them so.
    """

    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def guard(self, trainer: Any, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BaseException:
            names = _STATE if len(self.state) == 4 else (*_STATE[:2], _STATE[3])
            trainer._jax_state = dict(zip(names, self.state, strict=True))
            trainer._jax_state_synced = False
            trainer.jax_state_sync()
            raise
