"""Heads: what they compute, in which precision, and what does not fit."""

import numpy as np
import pytest

from keras_diffusion_opd import backend
from keras_diffusion_opd.data import OutputHead
from tests.oracles import numpy, tensor

D, V = 3, 5
WEIGHT, HIDDEN = np.random.default_rng(0).normal(size=(D, V)), np.random.default_rng(1).normal(size=(2, 4, D))


def test_logits_are_the_formula():
    rng = np.random.default_rng(2)
    bias, a, b = rng.normal(size=V), rng.normal(size=(D, 2)), rng.normal(size=(2, V))
    expected = 3.0 * np.tanh((HIDDEN @ (WEIGHT + a @ b) + bias) / 3.0)
    settings = {"bias": tensor(bias), "softcap": 3.0, "low_rank": (tensor(a), tensor(b))}
    for weight, transposed in ((WEIGHT, False), (WEIGHT.T.copy(), True)):
        head = OutputHead(tensor(weight), transposed=transposed, **settings)
        np.testing.assert_allclose(numpy(head.logits(tensor(HIDDEN))), expected, rtol=1e-5)
    short = OutputHead(tensor(WEIGHT), vocabulary_size=4, **settings).logits(tensor(HIDDEN))
    np.testing.assert_allclose(numpy(short), expected[..., :4], rtol=1e-5)


def test_products_of_bfloat16_are_summed_and_kept_in_float32():
    # 256 + 1 - 256 is 0 where a partial sum, and 257 is 256 where the result, is kept in bfloat16.
    a, b = tensor([[256.0, 1.0, -256.0], [256.0, 1.0, 0.0]], "bfloat16"), tensor(np.ones((3, 2)), "bfloat16")
    product = backend.wide_product(a, b)
    assert numpy(product).tolist() == [[1.0, 1.0], [257.0, 257.0]]
    assert "float32" in str(product.dtype)
    turned = backend.wide_product(
        tensor(numpy(a).T, "bfloat16"), tensor(np.ones((2, 3)), "bfloat16"), transpose_a=True, transpose_b=True
    )
    assert numpy(turned).tolist() == [[1.0, 1.0], [257.0, 257.0]]
    assert "float32" in str(OutputHead(tensor(WEIGHT, "bfloat16")).logits(tensor(HIDDEN, "bfloat16")).dtype)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"weight": np.ones(3)}, ValueError, r"`head` must have 2 axes. Received shape \(3,\)"),
        ({"weight": np.ones((3, 5), int)}, TypeError, r"`head` must have a floating-point dtype. Received int64"),
        ({"weight": [[1.0]]}, TypeError, r"`head` must be a NumPy array or a tensor"),
        ({"bias": np.ones(3)}, ValueError, r"`bias` must have shape \(5,\)"),
        ({"softcap": -1.0}, ValueError, r"`softcap` must be above 0"),
        ({"low_rank": np.ones((3, 2))}, TypeError, r"`low_rank` must be None or a pair"),
        ({"low_rank": (np.ones((3, 2)), np.ones((3, 5)))}, ValueError, r"\(3, r\) and \(r, 5\)"),
        ({"vocabulary_size": 6}, ValueError, r"at most the 5 columns.*transposed=True"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        OutputHead(**{"weight": WEIGHT, **changes})
