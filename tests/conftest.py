"""Shared by all tests: the backend is the environment's (JAX where it says nothing)."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
