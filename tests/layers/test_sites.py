"""The layers that hold factors: against NumPy, and as Keras layers."""

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.layers import BankedSite, TrainedSite

RNG = np.random.default_rng(0)


def filled(looks_up: bool = False) -> tuple[BankedSite, list[np.ndarray], list[np.ndarray]]:
    site = BankedSite(4, 3, slots=3, max_rank=3, looks_up=looks_up)
    a = [RNG.normal(size=(4, rank)).astype("float32") for rank in (1, 2, 3)]
    b = [RNG.normal(size=(rank, 3)).astype("float32") for rank in (1, 2, 3)]
    for slot, (left, right) in enumerate(zip(a, b, strict=True), start=1):
        site.write(slot, left, right)
    return site, a, b


def expected(
    rows: list[np.ndarray], a: list[np.ndarray], b: list[np.ndarray], slots: np.ndarray, w: np.ndarray
) -> list:
    return [
        sum(w[i, s] * (row @ a[slots[i, s] - 1] @ b[slots[i, s] - 1]) for s in range(w.shape[1]) if slots[i, s])
        + np.zeros((len(row), 3))
        for i, row in enumerate(rows)
    ]


SLOTS = np.array([[0, 0], [1, 3], [2, 0]], "int32")
WEIGHTS = np.array([[0, 0], [0.5, -2.0], [1.5, 0]], "float32")


def test_rows_get_the_factors_they_chose() -> None:
    site, a, b = filled()
    x = RNG.normal(size=(3, 5, 4)).astype("float32")
    y = ops.convert_to_numpy(site(x, SLOTS, WEIGHTS))
    np.testing.assert_allclose(y, expected(list(x), a, b, SLOTS, WEIGHTS), atol=1e-5)  # float32 around 10
    assert not y[0].any()


def test_ids_are_looked_up_and_tables_read_in_reverse() -> None:
    site, a, b = filled(looks_up=True)
    ids = RNG.integers(0, 4, (3, 5)).astype("int32")
    y = ops.convert_to_numpy(site(ids, SLOTS, WEIGHTS))
    np.testing.assert_allclose(y, expected(list(np.eye(4)[ids]), a, b, SLOTS, WEIGHTS), atol=1e-5)
    x = RNG.normal(size=(3, 2, 3)).astype("float32")
    back = ops.convert_to_numpy(site.reversed(ops.convert_to_tensor(x), SLOTS, WEIGHTS))
    table = expected([np.eye(4)] * 3, a, b, SLOTS, WEIGHTS)
    np.testing.assert_allclose(back, [row @ t.T for row, t in zip(x, table, strict=True)], atol=2e-5)


def test_writing_a_slot_leaves_the_others_and_clearing_gives_zeros() -> None:
    site, _, _ = filled()
    before = [ops.convert_to_numpy(v.value).copy() for v in (site.a, site.b)]
    site.clear(2)
    for variable, old in zip((site.a, site.b), before, strict=True):
        now = ops.convert_to_numpy(variable.value)
        assert np.array_equal(now[[0, 1, 3]], old[[0, 1, 3]]) and not now[2].any() and old[2].any()


def test_configs_give_the_same_layers() -> None:
    for site in (
        BankedSite(4, 3, slots=2, max_rank=2, dora=True, name="x"),
        TrainedSite(4, 3, 2, 0.5, dora=True, dropout=0.1, seed=4, name="y"),
    ):
        again = type(site).from_config(site.get_config())
        assert again.get_config() == site.get_config()
        assert [v.shape for v in again.variables] == [v.shape for v in site.variables]


def test_trained_site_acts_on_its_rows_alone() -> None:
    site = TrainedSite(4, 3, 2, 0.5)
    site.b.assign(RNG.normal(size=(2, 3)))
    x = RNG.normal(size=(3, 5, 4)).astype("float32")
    x[0] = np.nan
    y = ops.convert_to_numpy(site(x, np.array([0.0, 1.0, -2.0], "float32")))
    a, b = (ops.convert_to_numpy(v.value) for v in (site.a, site.b))
    assert not y[0].any()
    np.testing.assert_allclose(y[1], 0.5 * x[1] @ a @ b, atol=1e-6)
    np.testing.assert_allclose(y[2], -x[2] @ a @ b, atol=2e-6)


def test_dropout_acts_in_training_alone() -> None:
    site = TrainedSite(64, 3, 2, 1.0, dropout=0.5, seed=1)
    site.b.assign(np.ones((2, 3)))
    x, one = np.ones((1, 1, 64), "float32"), np.ones(1, "float32")
    still, again = (ops.convert_to_numpy(site(x, one, training=False)) for _ in range(2))
    assert np.array_equal(still, again)
    assert not np.array_equal(ops.convert_to_numpy(site(x, one, training=True)), still)


def test_gain_is_a_weighted_sum_and_ignores_what_is_not_used() -> None:
    site = BankedSite(4, 3, slots=2, max_rank=1, dora=True)
    gain = np.array([0.5, -0.5, 0.0], "float32")
    site.write(1, np.ones((4, 1), "float32"), np.ones((1, 3), "float32"), gain)
    site.write(2, np.ones((4, 1), "float32"), np.ones((1, 3), "float32"), np.full(3, np.nan, "float32"))
    found = site.gain_of(ops.convert_to_tensor([[1, 2]]), ops.convert_to_tensor([[2.0, 0.0]]), "float32")
    np.testing.assert_allclose(ops.convert_to_numpy(found), [[2 * gain]])
    assert keras.saving.get_registered_name(BankedSite) == "keras_diffusion_opd>BankedSite"
