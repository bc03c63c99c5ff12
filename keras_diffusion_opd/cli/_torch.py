"""The devices of PyTorch."""

import torch


def devices() -> list[str]:
    """One line for each device."""
    cuda = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
