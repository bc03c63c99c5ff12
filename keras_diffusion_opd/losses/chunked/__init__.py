"""Distillation from hidden states: logits exist for a few positions at a time, gradients are made on the way."""
