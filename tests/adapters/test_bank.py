"""Stacks, slots, leases, and what one tenant may not do to another."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from keras_diffusion_opd import backend
from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack
from keras_diffusion_opd.provenance import digest
from tests.adapters.tools import merged, mlp, plain, random_adapter, run, same_bits, values

X = np.random.default_rng(1).normal(size=(4, 5, 6)).astype("float32")
# Sums of up to 8 products in another order, at outputs of about 5.
CLOSE = {"atol": 5e-6, "rtol": 0}


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return mlp()


@pytest.fixture
def bank(model: keras.Model) -> Any:
    bank = AdapterBank(model, ".*", slots=4, max_rank=4, max_stack=3)
    for seed, (name, rank) in enumerate([("a", 1), ("b", 2), ("c", 4)]):
        bank.add(random_adapter(name, model, rank=rank, seed=seed, alpha=3.0))
    yield bank
    if bank.fused is not None:
        bank.unfuse()
    bank.detach()


def test_stacks_that_mean_the_same_are_equal() -> None:
    assert Stack("b", a=0.5) == Stack(a=0.5, b=1.0) == Stack.of({"b": 1, "a": 0.5})
    assert hash(Stack("b", a=0.5)) == hash(Stack(a=0.5, b=1.0))
    assert Stack("a", "a") == Stack(a=2.0) and Stack("a", a=-1.0) == Stack() and not Stack()
    assert [name for name, _ in Stack("z", "a", "m")] == ["a", "m", "z"]
    for name in ("../x", "a/b", "", ".hidden", "a b", "x..y"):
        with pytest.raises(ValueError, match="name"):
            Stack(name)
    with pytest.raises(ValueError, match="finite"):
        Stack(a=float("nan"))
    with pytest.raises(AttributeError, match="does not change"):
        Stack("a").items = ()  # type: ignore[misc]


def test_fresh_adapter_changes_no_bit(model: keras.Model, bank: AdapterBank) -> None:
    bank.add(Adapter.initial("fresh", model, ".*", rank=3))
    assert same_bits([run(bank, X, ["fresh"] * 4)], [plain(model, X)])


def test_adapters_differ_repeat_and_compose(model: keras.Model, bank: AdapterBank) -> None:
    outputs = {name: run(bank, X, [stack] * 4) for name, stack in (("", None), ("a", "a"), ("b", "b"))}
    assert all(np.abs(outputs[x] - outputs[y]).max() > 1e-2 for x, y in (("", "a"), ("", "b"), ("a", "b")))
    assert same_bits([run(bank, X, ["a"] * 4)], [outputs["a"]])
    both = run(bank, X, [Stack("a", "b")] * 4)
    assert min(np.abs(both - outputs[name]).max() for name in "ab") > 1e-2


@pytest.mark.parametrize("stack", [Stack("a"), Stack("a", b=-0.5, c=2.0), Stack(c=-1.0)], ids=repr)
def test_stack_equals_merged_kernels(model: keras.Model, bank: AdapterBank, stack: Stack) -> None:
    adapters = {name: bank.get(name) for name in bank.names}
    np.testing.assert_allclose(run(bank, X, [stack] * 4), merged(model, adapters, stack, X), **CLOSE)


def test_each_row_of_a_mixed_batch_equals_the_row_of_a_homogeneous_one(model: keras.Model, bank: AdapterBank) -> None:
    stacks = [None, "a", Stack("b", c=0.3), Stack(a=-1.0, c=1.0)]
    mixed = run(bank, X, stacks)
    for row, stack in enumerate(stacks):
        assert same_bits([run(bank, X, [stack] * 4)[row]], [mixed[row]]), stack
    assert same_bits([mixed[0]], [plain(model, X)[0]])


def test_order_and_slots_change_no_bit(model: keras.Model, bank: AdapterBank) -> None:
    before = run(bank, X, [Stack("a", "b")] * 4)
    assert same_bits([run(bank, X, [Stack("b", "a")] * 4)], [before])
    kept = bank.get("a")
    slot = bank.select(["a"]).slots[0, 0]
    bank.remove("a")
    bank.add(kept)
    assert bank.select(["a"]).slots[0, 0] != slot
    assert same_bits([run(bank, X, [Stack("a", "b")] * 4)], [before])


def test_negative_weight_flips_the_delta_and_cancels(model: keras.Model) -> None:
    x = keras.Input((6,))
    linear = keras.Model(x, keras.layers.Dense(3)(x))
    bank = AdapterBank(linear, ".*", slots=2, max_rank=2, max_stack=2)
    bank.add(random_adapter("a", linear))
    rows = X[:, 0]
    base, plus, minus = (run(bank, rows, [s] * 4) for s in (None, "a", Stack(a=-1.0)))
    np.testing.assert_allclose(plus - base, base - minus, atol=1e-6)  # float32 around 3
    assert same_bits([run(bank, rows, [Stack("a", a=-1.0)] * 4)], [base])


def test_stack_of_one_adapter_with_weight_one_is_that_adapter(model: keras.Model) -> None:
    bank = AdapterBank(model, ".*", slots=2, max_rank=4, max_stack=1, dora=True)
    for more in ({"rslora": True}, {"dora": True}, {"alpha": 9.0, "rank": 4}):
        adapter = random_adapter("one", model, **more)
        bank.add(adapter, replace=True)
        expected = merged(model, {"one": adapter}, Stack("one"), X)
        np.testing.assert_allclose(run(bank, X, [Stack(one=1.0)] * 4), expected, **CLOSE)
    bank.detach()


def test_user_weight_multiplies_the_scale_of_rslora(model: keras.Model) -> None:
    adapter = random_adapter("a", model, rank=4, alpha=8.0, rslora=True)
    assert next(iter(adapter.parts.values())).scale == 4.0
    bank = AdapterBank(model, ".*", slots=1, max_rank=4, max_stack=1)
    bank.add(adapter)
    expected = merged(model, {"a": adapter}, Stack(a=0.5), X)
    np.testing.assert_allclose(run(bank, X, [Stack(a=0.5)] * 4), expected, **CLOSE)
    bank.detach()


def test_layers_that_an_adapter_lacks_keep_the_base(model: keras.Model, bank: AdapterBank) -> None:
    bank.add(random_adapter("part", model, ["head"]))
    bank.remove("c")
    bank.add(random_adapter("other", model, ["hidden"]))
    adapters = {name: bank.get(name) for name in bank.names}
    for name in ("part", "other"):
        np.testing.assert_allclose(run(bank, X, [name] * 4), merged(model, adapters, Stack(name), X), **CLOSE)


def test_base_after_adapters_is_a_fresh_base(model: keras.Model, bank: AdapterBank) -> None:
    fresh = plain(mlp(), X)
    run(bank, X, ["a", "b", "c", None])
    assert same_bits([plain(model, X)], [fresh])
    assert same_bits([run(bank, X, [None] * 4)], [fresh])


def test_base_rows_keep_infinities_and_negative_zeros() -> None:
    x = keras.Input((2,))
    model = keras.Model(x, keras.layers.Dense(2, use_bias=False, name="d")(x))
    model.get_layer("d").set_weights([np.array([[1.0, -1.0], [0.0, 0.0]], "float32")])
    bank = AdapterBank(model, ".*", slots=1, max_rank=1, max_stack=1)
    bank.add(random_adapter("a", model, rank=1))
    rows = np.array([[np.inf, 1.0], [0.0, -0.0], [1.0, 1.0]], "float32")
    assert same_bits([run(bank, rows, [None, None, "a"])[:2]], [plain(model, rows)[:2]])


def test_adapter_of_nan_is_refused_and_would_hurt_only_its_own_rows(model: keras.Model, bank: AdapterBank) -> None:
    a, b = np.ones((6, 1), "float32"), np.full((1, 8), np.nan, "float32")
    with pytest.raises(ValueError, match="hidden.*finite"):
        Adapter.from_arrays("bad", model, {"hidden": (a, b)})
    with pytest.raises(ValueError, match="not finite in float32"):
        huge = {"hidden": (a, np.full((1, 8), 1e38, "float32"))}
        bank.add(Adapter.from_arrays("huge", model, huge, alpha=1e9))
    before = run(bank, X, [None, "a", "b", "c"])
    for site in bank.banked:
        for factor in (site.a, site.b):
            poisoned = np.array(keras.ops.convert_to_numpy(factor.value))
            poisoned[bank.select(["b"]).slots[0, 0]] = np.nan
            factor.assign(poisoned)
    after = run(bank, X, [None, "a", "b", "c"])
    assert np.isnan(after[2]).all()
    assert same_bits([after[[0, 1, 3]]], [before[[0, 1, 3]]])


def test_adapters_that_do_not_fit_are_refused_and_change_nothing(model: keras.Model) -> None:
    bank = AdapterBank(model, ["hidden"], slots=2, max_rank=2, max_stack=1)
    bank.add(random_adapter("a", model, ["hidden"]))
    before = values(bank)
    other = mlp(seed=5)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (random_adapter("big", model, ["hidden"], rank=3), {}, "rank 3 .*bytes are needed"),
        (random_adapter("far", model, ["head"]), {}, "no targets"),
        (random_adapter("dora", model, ["hidden"], dora=True), {}, "dora=True"),
        (random_adapter("a", model, ["hidden"], seed=2), {}, "taken"),
        (random_adapter("foreign", other, ["hidden"]), {}, "belongs to a base"),
    ]
    for adapter, arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            bank.add(adapter, **arguments)
    assert same_bits(values(bank), before) and bank.names == ["a"]
    bank.add(refused[-1][0], check_base=False)
    assert bank.names == ["a", "foreign"]
    bank.detach()


def test_unknown_names_and_long_stacks_are_refused_before_anything_runs(bank: AdapterBank) -> None:
    with pytest.raises(KeyError, match="vae"):
        bank.select(["vae"])
    with pytest.raises(ValueError, match="max_stack"):
        bank.lease(Stack("a", "b", "c", "d"))
    with pytest.raises(ValueError, match="one stack for each row"):
        bank.select([])
    with pytest.raises(ValueError, match="3 rows|rows"):
        run(bank, X[:3], ["a"] * 4)


def test_targets_that_choose_nothing_are_refused_with_the_nearest_names(model: keras.Model) -> None:
    for targets in ("hiden", ["head", "heaad"], lambda path, layer: False):
        with pytest.raises(ValueError, match="nearest names are .*(hidden|head)"):
            AdapterBank(model, targets)
    with pytest.raises(TypeError, match="pattern"):
        AdapterBank(model, 3)


def test_leased_slots_are_never_evicted_and_running_rows_do_not_change(model: keras.Model) -> None:
    bank = AdapterBank(model, ".*", slots=2, max_rank=2, max_stack=1)
    bank.add(random_adapter("a", model))
    lease = bank.lease("a")
    running = run(bank, X, [lease] * 4)
    for index in range(5):
        bank.add(random_adapter(f"n{index}", model, seed=index), evict=True)
        assert same_bits([run(bank, X, [lease] * 4)], [running])
    assert bank.names == ["a", "n4"]
    with bank.lease("n4"), pytest.raises(RuntimeError, match="Release a lease"):
        bank.add(random_adapter("more", model), evict=True)
    with pytest.raises(RuntimeError, match="evict=True to give up 'n4'"):
        bank.add(random_adapter("more", model))
    lease.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        bank.select([lease])
    bank.detach()


def test_removed_and_replaced_adapters_stay_until_their_last_lease_ends(model: keras.Model) -> None:
    bank = AdapterBank(model, ".*", slots=3, max_rank=2, max_stack=1)
    bank.add(random_adapter("a", model))
    leases = [bank.lease("a") for _ in range(16)]
    key, running = leases[0].key, run(bank, X, leases[:4])
    bank.add(random_adapter("a", model, seed=7), replace=True)
    assert bank.key("a") != key == leases[1].key
    assert same_bits([run(bank, X, leases[4:8])], [running])
    assert not same_bits([run(bank, X, ["a"] * 4)], [running])
    bank.remove("a")
    with pytest.raises(KeyError):
        bank.lease("a")
    assert same_bits([run(bank, X, leases[:4])], [running])
    bank.add(random_adapter("b", model))  # others are not blocked
    for lease in leases:
        lease.release()
    free = [slot for slot in range(1, 4) if slot != bank.select(["b"]).slots[0, 0]]
    assert not any(np.any(keras.ops.convert_to_numpy(site.b.value)[free]) for site in bank.banked)
    bank.detach()


def test_key_goes_by_content_and_weight(model: keras.Model, bank: AdapterBank) -> None:
    first = bank.key(Stack("a", b=0.5))
    assert first == bank.key(Stack(b=0.5, a=1.0)) and bank.key(None) == ()
    assert bank.key("a") != bank.key("b") != bank.key(Stack(b=0.5))
    bank.add(random_adapter("a", model, seed=3), replace=True)
    assert bank.key(Stack("a", b=0.5)) != first
    bank.add(bank.get("a").renamed("other"))
    assert bank.key("other") == bank.key("a")


def test_100_swaps_of_rank_alpha_and_targets_compile_nothing_again(model: keras.Model, bank: AdapterBank) -> None:
    traces = []

    def forward(x: Any, selection: Any) -> Any:
        traces.append(1)
        with bank.scope(selection):
            return model(x, training=False)

    run_compiled = bank.compiled(forward)
    first = np.array(run_compiled(X, bank.select(["a"] * 4)))
    count = len(traces)
    rng = np.random.default_rng(0)
    for index in range(100):
        targets = [["hidden"], ["head"], ".*", ["mixed", "head"]][index % 4]
        rank, alpha = int(rng.integers(1, 5)), float(rng.uniform(0.5, 9))
        bank.add(random_adapter("b", model, targets, rank=rank, alpha=alpha, seed=index), replace=True)
        y = np.array(run_compiled(X, bank.select(["a", "b", None, Stack(a=0.1, b=-1.0)])))
        # The swap is seen by its users, and by no bit of the others.
        assert same_bits([y[0]], [first[0]]), index
    adapters = {name: bank.get(name) for name in bank.names}
    np.testing.assert_allclose(y[1], merged(model, adapters, Stack("b"), X)[1], **CLOSE)
    assert len(traces) - count == (100 if backend.BACKEND == "torch" else 0)  # torch runs the function itself


def test_compiled_base_row_has_the_bits_of_the_compiled_plain_model(model: keras.Model, bank: AdapterBank) -> None:
    def forward(x: Any, selection: Any) -> Any:
        with bank.scope(selection):
            return model(x, training=False)

    base = backend.compiled(lambda x: model(x, training=False), [model])
    y = np.array(bank.compiled(forward)(X, bank.select([None, "a", None, "b"])))
    assert same_bits([y[[0, 2]]], [np.array(base(X))[[0, 2]]])


def test_selection_that_would_become_a_constant_is_refused(model: keras.Model, bank: AdapterBank) -> None:
    selection = bank.select(["a"] * 4)

    def closed_over(x: Any) -> Any:
        with bank.scope(selection):
            return model(x, training=False)

    if backend.BACKEND == "torch":
        pytest.skip("torch runs as it goes: nothing becomes a constant")
    with pytest.raises(ValueError, match="would become constants"):
        bank.compiled(closed_over)(X)


def test_scope_that_no_layer_reads_is_refused(model: keras.Model, bank: AdapterBank) -> None:
    with pytest.raises(RuntimeError, match="had no effect"), bank.scope(["a"] * 4):
        pass
    with pytest.raises(ZeroDivisionError), bank.scope(["a"] * 4):
        _ = 1 / 0


def test_classifier_free_guidance_doubles_the_batch(model: keras.Model, bank: AdapterBank) -> None:
    stacks = ["a", "b", None, Stack("a", c=0.5)]
    once = run(bank, X, stacks)
    with bank.scope(bank.select(stacks), copies=2):
        twice = keras.ops.convert_to_numpy(model(np.concatenate([X, X]), training=False))
    np.testing.assert_allclose(twice, np.concatenate([once, once]), **CLOSE)


def test_model_is_not_changed_and_detach_gives_the_calls_back() -> None:
    model = mlp(seed=3)
    before, flags = digest(model), [v.trainable for v in model.variables]
    config = model.get_config()
    bank = AdapterBank(model, ".*", slots=1, max_rank=1, max_stack=1)
    bank.add(random_adapter("a", model, rank=1))
    run(bank, X, ["a"] * 4)
    assert digest(model) == before and [v.trainable for v in model.variables] == flags
    assert model.get_config() == config
    assert not {id(v) for v in bank.variables} & {id(v) for v in model.variables}
    bank.detach()
    assert all("call" not in vars(layer) for layer in model.layers)


def test_adapter_never_changes(model: keras.Model) -> None:
    a, b = np.ones((6, 1), "float32"), np.ones((1, 8), "float32")
    adapter = Adapter.from_arrays("x", model, {"hidden": (a, b)})
    before = adapter.digest
    a[:] = 5  # the caller's array, not the adapter's
    with pytest.raises(ValueError, match="read-only"):
        adapter.parts["hidden"].a[0] = 3
    with pytest.raises(TypeError):
        adapter.parts["hidden"] = None  # type: ignore[index]
    assert (
        Adapter.from_arrays("y", model, {model.get_layer("hidden"): (np.ones((6, 1), "float32"), b)}).digest == before
    )
    assert Adapter.from_arrays("x", model, {"hidden": (a, b)}).digest != before


def test_eight_requests_of_eight_stacks_run_in_one_forward(model: keras.Model, bank: AdapterBank) -> None:
    stacks = [None, "a", "b", "c", Stack("a", "b"), Stack(a=-1.0), Stack(b=0.5, c=0.5), Stack("a", "b", "c")]
    x = np.concatenate([X, X])
    y = run(bank, x, stacks)
    for row, stack in enumerate(stacks):
        assert same_bits([run(bank, x, [stack] * 8)[row]], [y[row]])


def test_requests_that_take_turns_equal_each_alone_bit_for_bit(model: keras.Model, bank: AdapterBank) -> None:
    """Requests of different length and stack, stepped together in changing rows, against one after the other."""
    stacks, steps = [Stack("a"), Stack(), Stack("b", c=-0.5)], [5, 3, 4]
    rng = np.random.default_rng(0)

    def step(states: list[np.ndarray], chosen: list[Stack]) -> np.ndarray:
        rows = np.stack([*states, *[np.zeros_like(X[0])] * (4 - len(states))])  # one size of batch
        y = run(bank, rows, [*chosen, *[None] * (4 - len(chosen))])
        return rows[: len(states)] + 0.1 * np.pad(y[: len(states)], ((0, 0), (0, 0), (0, 2)))

    alone = []
    for request, stack in enumerate(stacks):
        state = X[request]
        for _ in range(steps[request]):
            state = step([state], [stack])[0]
        alone.append(state)
    together, left = [X[request] for request in range(3)], list(steps)
    while any(left):
        turn = rng.permutation([request for request in range(3) if left[request]])
        for request, state in zip(turn, step([together[r] for r in turn], [stacks[r] for r in turn]), strict=True):
            together[request] = state
            left[request] -= 1
    assert same_bits(together, alone)


def test_leaky_bank_would_be_found(model: keras.Model, bank: AdapterBank) -> None:
    """The comparisons above have teeth: one adapter for all rows, as a global switch gives, differs."""
    mixed, leaky = run(bank, X, ["a", None, None, None]), run(bank, X, ["a"] * 4)
    assert same_bits([mixed[0]], [leaky[0]]) and not same_bits([mixed[1]], [leaky[1]])


def test_threads_have_scopes_of_their_own(model: keras.Model, bank: AdapterBank) -> None:
    stacks = [None, "a", "b", "c"] * 4
    alone = [run(bank, X, [stack] * 4) for stack in stacks]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda stack: run(bank, X, [stack] * 4), stacks))
    assert same_bits(together, alone)
