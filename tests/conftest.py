"""Shared by all tests: the backend is the environment's (JAX where it says nothing)."""

import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tests compile thousands of tiny programs once each: compiling, not running, is what takes the time. Less
# optimisation, XLA's older emitter of fusions (half the time to compile of the newer one) and a cache on disk,
# shared by the workers, cut it to a third. Subprocesses of tests that measure or that check compiled numerics
# at full optimisation clear XLA_FLAGS.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false",
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
