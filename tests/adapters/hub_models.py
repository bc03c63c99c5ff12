"""Tiny KerasHub models with inputs, and what is adapted in them."""

from typing import Any

import keras
import numpy as np
import pytest

keras_hub = pytest.importorskip("keras_hub", reason="KerasHub is the extra `hub`")

ROWS = 4


def build(name: str) -> tuple[Any, dict[str, np.ndarray], str]:
    """Model, inputs of 4 rows, targets."""
    models, rng = keras_hub.models, np.random.default_rng(0)
    keras.utils.set_random_seed(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(ROWS, *shape)).astype("float32")

    small = {"vocabulary_size": 31, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 24}
    ids = {
        "token_ids": rng.integers(3, 31, (ROWS, 6)).astype("int32"),
        "padding_mask": np.ones((ROWS, 6), "int32"),
    }
    if name == "bert":
        model = models.BertBackbone(**small, num_heads=2, max_sequence_length=8, dropout=0.0)
        return model, {**ids, "segment_ids": np.zeros((ROWS, 6), "int32")}, ".*"
    if name == "roberta":
        return models.RobertaBackbone(**small, num_heads=2, max_sequence_length=8, dropout=0.0), ids, ".*"
    heads = {"num_query_heads": 2, "num_key_value_heads": 1}
    if name == "llama3":
        return models.Llama3Backbone(**small, **heads), ids, r".*_dense|token_embedding"
    if name == "gemma3":
        more = {"image_size": 16, "head_dim": 8, "use_bidirectional_attention": True}
        return models.Gemma3Backbone(**small, **heads, **more), ids, ".*"
    if name == "mmdit":
        return mmdit(), mmdit_inputs(normal, rng), ".*"
    return flux(), flux_inputs(normal), ".*"


def mmdit() -> Any:
    """Two blocks, one of them with dual attention; modulations that are not zero."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    return MMDiT(
        patch_size=2,
        hidden_dim=16,
        num_layers=2,
        num_heads=2,
        position_size=8,
        mlp_ratio=4.0,
        latent_shape=(4, 4, 4),
        context_shape=(None, 12),
        pooled_projection_shape=(8,),
        qk_norm="rms_norm",
        dual_attention_indices=(0,),
    )


def mmdit_inputs(normal: Any, rng: Any) -> dict[str, np.ndarray]:
    """Latents, context, pooled projection, timesteps."""
    timestep = rng.uniform(0, 1000, (ROWS, 1)).astype("float32")
    return {"latent": normal(4, 4, 4), "context": normal(3, 12), "pooled_projection": normal(8), "timestep": timestep}


def flux() -> Any:
    """One double and one single block, with guidance."""
    return keras_hub.models.FluxBackbone(
        input_channels=4,
        hidden_size=16,
        mlp_ratio=4.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[2, 2, 4],
        theta=10000,
        use_bias=True,
        guidance_embed=True,
        image_shape=(4, 4),
        text_shape=(3, 12),
        image_ids_shape=(4, 3),
        text_ids_shape=(3, 3),
        y_shape=(8,),
    )


def flux_inputs(normal: Any) -> dict[str, np.ndarray]:
    """A 2x2 image and three tokens."""
    grid = np.stack([np.zeros(4), np.repeat([0, 1], 2), np.tile([0, 1], 2)], -1).astype("float32")
    return {
        "image": normal(4, 4),
        "image_ids": np.tile(grid, (ROWS, 1, 1)),
        "text": normal(3, 12),
        "text_ids": np.zeros((ROWS, 3, 3), "float32"),
        "y": normal(8),
        "timesteps": np.linspace(0.1, 0.9, ROWS).astype("float32"),
        "guidance": np.full((ROWS,), 3.5, "float32"),
    }
