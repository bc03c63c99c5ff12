"""PyTorch: differentiate with `torch.autograd.grad`, eager unless `jit_compile=True`. See `window.py`."""

import warnings
from typing import Any

import keras
import torch

from keras_diffusion_opd.data.targets import attach_shared
from keras_diffusion_opd.trainers.checks import add_violations, no_violations, raise_violations, sound


class BackendWindow:
    """The PyTorch half of `WindowTrainer`."""

    # The rest of the trainer, as this half sees it.
    micro_batch: Any
    updated: Any
    violation_messages: Any
    gradient_scale: Any
    mean_gradients: Any
    sum_dtype: Any
    optimizer: Any
    trainable_variables: Any
    get_metrics_result: Any
    predict_step: Any
    on_empty: str
    jit_compile: bool
    run_eagerly: bool
    window_done: Any

    steps_per_execution: int

    def fit(self, *positional: Any, **arguments: Any) -> Any:
        """Keras's fit. A short last window is no reason to warn that the data ran out."""
        with warnings.catch_warnings():
            if self.steps_per_execution > 1 and arguments.get("steps_per_epoch") is None:
                warnings.filterwarnings("ignore", message="Your input ran out of data")
            return super().fit(*positional, **arguments)  # type: ignore[misc]

    def _micro(self, data: Any, index: int) -> Any:
        """Gradients of one micro-batch (float32 and undone of scaling), its weight and its violations."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        primary, found = self.micro_batch(x, y, sample_weight, True)
        scale = self.gradient_scale(primary.weight)
        values = [v.value for v in self.trainable_variables]
        # Not backward(): Keras's zero_grad misses variables of equal path, whose gradients would add up.
        gradients = torch.autograd.grad(self.optimizer.scale_loss(primary.total * scale), values, allow_unused=True)
        wide = [
            None if g is None else g.to(getattr(torch, self.sum_dtype(v))) / scale
            for g, v in zip(gradients, self.trainable_variables, strict=True)
        ]
        checks = self.violation_messages()
        return wide, primary.weight.detach(), add_violations(checks, no_violations(checks), found, index)

    def _compiled(self, function: Any) -> Any:
        return torch.compile(function) if self.jit_compile and not self.run_eagerly else function

    def make_train_function(self, force: bool = False) -> None:
        """Build `train_function(window) -> logs`; Keras hands over the window's batches as a list."""
        if getattr(self, "train_function", None) is not None and not force:
            return
        micro = self._compiled(self._micro)

        def train_function(window: list[Any]) -> Any:
            sums: list[Any] = [None] * len(self.trainable_variables)
            weight, tables = torch.zeros(()), []
            for index, data in enumerate(map(attach_shared, window)):
                gradients, added, table = micro(data, index)
                sums = sums or [None] * len(gradients)
                sums = [a if g is None else g if a is None else a.add_(g) for a, g in zip(sums, gradients, strict=True)]
                weight = weight.to(added.device) + added
                tables.append(table)
            return self._finish(sums, weight, tables)

        self.train_function = train_function

    def _finish(self, sums: list[Any], weight: Any, tables: list[Any]) -> Any:
        with torch.no_grad():
            for table in tables:
                if not bool(sound(table)):
                    raise_violations(self.violation_messages(), table.cpu().numpy())
            moved = self.on_empty == "zero_grad" or bool(weight > 0)
            if moved:
                filled = [
                    torch.zeros_like(v.value, dtype=getattr(torch, self.sum_dtype(v))) if g is None else g
                    for g, v in zip(sums, self.trainable_variables, strict=True)
                ]
                self.optimizer.apply(self.mean_gradients(filled, weight), self.trainable_variables)
                self.updated()
            self.window_done(moved)
            return self.get_metrics_result()

    def pass_over(self, logs: Any, window: list[Any]) -> Any:
        """In place of `train_function` for a window that was done before: its batches have been drawn."""
        return logs

    def make_test_function(self, force: bool = False) -> None:
        """Build `test_function(batches) -> logs`; Keras's own takes one batch at a time only."""
        if getattr(self, "test_function", None) is not None and not force:
            return

        def test_function(batches: list[Any]) -> Any:
            with torch.no_grad():
                for data in map(attach_shared, batches):
                    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
                    _, found = self.micro_batch(x, y, sample_weight, False)
                    checks = self.violation_messages()
                    table = add_violations(checks, no_violations(checks), found, 0)
                    raise_violations(checks, table.cpu().numpy(), evaluating=True)
                return self.get_metrics_result()

        self.test_function = test_function

    def make_predict_function(self, force: bool = False) -> None:
        """Build `predict_function(batches) -> logits`; Keras's own takes one batch at a time only."""
        if getattr(self, "predict_function", None) is not None and not force:
            return

        def predict_function(batches: list[Any]) -> Any:
            with torch.no_grad():
                outputs = [self.predict_step(data) for data in batches]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

        self.predict_function = predict_function
