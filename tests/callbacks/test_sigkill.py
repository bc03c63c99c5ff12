"""A process that is killed at random moments, also while it saves, ends where one that is left alone ends."""

import os
import random
import signal
import time

import keras
import pytest

import keras_diffusion_opd as kdo
from tests.callbacks.small_run import digest_of, main, make_trainer, train

BACKEND = keras.backend.backend()
KILLS = 30
# Moments within saving at which every backend is stopped; compiling small programs takes JAX long.
MOMENTS = range(12) if BACKEND == "torch" else (0, 11)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGKILL")


def forked(directory):
    """A child of this process that trains in `directory`; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        main(directory, 0.002)
        status = 0
    finally:
        os._exit(status)


def killed(child, seconds):
    """Let a child live so long at most, then kill it; whether it had ended by itself."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def sound(directory):
    """Every checkpoint that has its name is complete; gives how many left-overs lie beside them."""
    if not directory.is_dir():
        return 0
    for path in directory.glob("step-*"):
        record = kdo.provenance.checkpoints.read_checkpoint_record(path)
        assert not kdo.provenance.checkpoints.checkpoint_problems(path, record)
    return len(list(directory.glob(".*.tmp")))


@pytest.mark.skipif(
    BACKEND != "torch",
    reason="JAX and TensorFlow do not survive a fork, and 30 processes of their own take minutes: test_signals has one",
)
def test_forked_process_killed_at_30_random_moments_ends_with_the_weights_of_one_that_was_not(tmp_path):
    expected = digest_of(train(tmp_path / "whole", make_trainer())[0])
    began = time.monotonic()
    assert killed(forked(tmp_path / "alone"), 60)
    alone = time.monotonic() - began
    rng, kills, left_over, rounds = random.Random(0), 0, 0, 0
    while kills < KILLS:
        rounds += 1
        directory = tmp_path / f"run-{rounds}"
        for _ in range(99):
            # Most children are killed while they save: the first checkpoint that is begun is waited for.
            ended = killed(forked(directory), rng.uniform(0.05, 0.9) * alone)
            kills += not ended
            left_over += sound(directory)
            if ended:
                break
        trainer = make_trainer(seed=rounds)
        state = kdo.callbacks.resume(trainer, directory)
        assert (state.epoch, state.batch, state.updates) == (2, 0, 6)
        assert digest_of(trainer) == expected
    assert left_over  # some were killed while they saved


def test_process_killed_within_every_step_of_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    """Each call to the system that saving the second one makes, in turn, is the last that the process makes."""

    class KilledError(BaseException):
        pass

    expected, reached = digest_of(train(tmp_path / "whole", make_trainer())[0]), set()
    for step in MOMENTS:
        directory, calls = tmp_path / f"killed-{step}", []

        def die(real, directory=directory, calls=calls, step=step):
            def call(*arguments, **keywords):
                saving = any(path.name.startswith(".step-00000002") for path in directory.glob("*"))
                calls.extend([1] if saving else [])
                if saving and len(calls) > step:
                    raise KilledError
                return real(*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename"):
                patch.setattr(os, name, die(getattr(os, name)))
            # What a kill leaves lies there until the next process removes it.
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(KilledError):
                train(directory, make_trainer())
        sound(directory)
        trainer = make_trainer(seed=step)
        state = kdo.callbacks.resume(trainer, directory)
        assert state.updates >= 1
        if step in (0, 6):
            train(directory, trainer, epoch=state.epoch)
            assert digest_of(trainer) == expected
        reached.add(state.updates)
    assert reached == {1, 5}  # killed before it has its name, and while it is removed, being old
