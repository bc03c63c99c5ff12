"""Shared by all tests: the backend is the environment's (JAX where it says nothing)."""

import os
import pathlib
import threading

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


def _share_lowering_contexts(uses: int = 200) -> None:
    """Have JAX lower `uses` programs in one MLIR context instead of a new one each.

    Making a context takes 5 to 10 ms, a third of what a tiny program costs from trace to machine code, and this suite
    compiles tens of thousands of them. Renewed now and then, since a context never forgets. `make_ir_context` is not
    public: where a version of JAX lacks it nothing is changed but the time.
    """
    from jax._src.interpreters import mlir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    here = threading.local()

    def shared() -> object:
        count = getattr(here, "count", 0)
        if count % uses == 0:
            here.context = make()
        here.count = count + 1
        return here.context

    mlir.make_ir_context = shared


if os.environ["KERAS_BACKEND"] == "jax":
    _share_lowering_contexts()
