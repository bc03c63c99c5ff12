"""The devices of TensorFlow."""

import tensorflow as tf


def devices() -> list[str]:
    """One line for each device."""
    names = [device.name for device in tf.config.list_physical_devices()]
    return [name.removeprefix("/physical_device:").lower() for name in names]
