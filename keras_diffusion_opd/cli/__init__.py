"""The command `kdo`. Nothing is imported before the command that needs it runs, so that it starts at once."""

from keras_diffusion_opd.cli.command import main

__all__ = ["main"]
