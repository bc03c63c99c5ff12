"""SIGTERM and Ctrl-C: real signals to real processes; the run that goes on equals the one that was left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import pytest

import keras_diffusion_opd as kdo
from tests.callbacks.small_run import WINDOWS, digest_of, make_trainer, state_of, train
from tests.students import same_bits

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGTERM that a process could catch")


class SendOnce(keras.callbacks.Callback):
    """Sends this process a signal in the middle of a window, or where it is told to."""

    def __init__(self, number, window, where="on_train_batch_begin", times=1):
        super().__init__()
        self.left, self.number, self.times = window, number, times
        setattr(self, where, self._send)

    def _send(self, *_, **__):
        self.left -= 1
        if not self.left:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def ctrl_c():
    """A process that was begun in the background has SIGINT ignored, which `fit` respects. Not so these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return state_of(train(tmp_path_factory.mktemp("whole"), make_trainer(), validate=True)[0])


def interrupted(directory, number, error, **arguments):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(error) as caught:
        train(directory, make_trainer(), SendOnce(number, **arguments), validate=True)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    return caught.value


@posix
@pytest.mark.parametrize(
    ("number", "error", "window", "where", "position"),
    [
        (signal.SIGTERM, SystemExit, 2, "on_train_batch_begin", (0, 6)),
        (signal.SIGINT, KeyboardInterrupt, 3, "on_train_batch_begin", (0, 7)),
        (signal.SIGTERM, SystemExit, 1, "on_test_batch_begin", (0, 7)),
        (signal.SIGINT, KeyboardInterrupt, 2, "on_test_end", (2, 0)),
        (signal.SIGTERM, SystemExit, 2, "on_epoch_begin", (1, 3)),
    ],
)
def test_signal_saves_ends_at_once_and_the_resumed_run_is_exact(
    number, error, window, where, position, whole, tmp_path
):
    left = interrupted(tmp_path, number, error, window=window, where=where)
    assert error is KeyboardInterrupt or left.code == 143
    trainer = make_trainer(seed=9)
    state = kdo.callbacks.resume(trainer, tmp_path)
    assert (state.epoch, state.batch) == position
    trainer, history = train(tmp_path, trainer, epoch=state.epoch, validate=True)
    assert same_bits(state_of(trainer), whole)
    assert state.epoch == 2 or "val_loss" in history.history


@posix
def test_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, make_trainer(), SendOnce(signal.SIGINT, 2, times=2))
    assert kdo.callbacks.resume(make_trainer(), tmp_path).updates == 1  # nothing was saved after the first window


@posix
def test_handler_of_the_users_own_is_left_alone_and_may_ask_for_a_stop(tmp_path):
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(tmp_path, every=99)
    before = signal.signal(signal.SIGTERM, lambda *_: checkpoint.stop())
    try:
        with pytest.raises(SystemExit) as caught:
            train(tmp_path, make_trainer(), SendOnce(signal.SIGTERM, 2), checkpoint=checkpoint)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143
    assert [path.name for path in checkpoint.paths()] == ["step-00000002"]


@posix
def test_handlers_are_given_back_when_training_fails(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert signal.getsignal(signal.SIGTERM) != before
            raise RuntimeError

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError):
        train(tmp_path, make_trainer(), Fail())
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_train_without_signals(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(tmp_path, make_trainer())[0].policy_version))
    thread.start()
    thread.join()
    assert found == [WINDOWS]


@posix
def test_process_that_is_preempted_ends_with_143_and_a_new_process_goes_on_exactly(tmp_path):
    """Two processes: preempted, left alone. `test_sigkill` kills without a warning."""
    trainer, _ = train(tmp_path / "whole", make_trainer())
    process = start(tmp_path / "run", "0.4")
    wait_for(process, lambda: list((tmp_path / "run").glob("step-00000003*")))
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 143 and not output, errors
    assert "SIGTERM: a checkpoint is written" in errors and "Traceback" not in errors
    assert not list((tmp_path / "run").glob(".*.tmp"))
    output, errors = start(tmp_path / "run", "0").communicate(timeout=120)
    assert output.strip() == digest_of(trainer), errors


def wait_for(process, happened):
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.0005)


def start(directory, slowness):
    """A process that trains in `directory`, resumed where something is there, and prints the final digest."""
    script = Path(__file__).with_name("small_run.py")
    root = script.parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), str(directory), slowness]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)
