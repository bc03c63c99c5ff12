"""The devices of JAX."""

import jax


def devices() -> list[str]:
    """One line for each device."""
    return [f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()]
