"""Demonstrations on real data: `kdo demo NAME`."""
