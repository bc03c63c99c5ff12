"""The half of a bank that chooses: leases, selections of batches, keys of caches."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.selection import Selection
from keras_diffusion_opd.adapters.slots import Lease, Resident, SlotTable
from keras_diffusion_opd.adapters.stack import Stack, as_stack


class Choosing:
    """What `AdapterBank` has of stacks."""

    # The rest of the bank, as this half sees it.
    _table: SlotTable
    _guard: threading.RLock
    max_stack: int
    _refuse_if_fused: Any
    _vacate: Any

    def lease(self, stack: Any) -> Lease:
        """Pin the adapters of a stack: their slots stay what they are until `release`.

        Args:
            stack: a `Stack`, a name, a mapping or None.

        Returns:
            A lease, which `select` takes in place of the stack; a context manager.

        Raises:
            KeyError: an adapter that is not there.
            ValueError: more than `max_stack` adapters.
        """
        with self._guard:
            self._refuse_if_fused("lease")
            return self._leased(self._short(as_stack(stack)))

    def select(self, stacks: Sequence[Any]) -> Selection:
        """The selection of a batch. It is of the adapters that are resident now: hold leases across changes.

        Args:
            stacks: one stack or lease for each row.

        Returns:
            Arrays (batch, max_stack), which `scope` takes.

        Raises:
            KeyError: an adapter that is not there.
            ValueError: more than `max_stack` adapters for one row, no rows, or a lease that was released.
        """
        if isinstance(stacks, str | Stack | Lease) or not len(stacks):
            raise ValueError(f"`stacks` must be a list with one stack for each row. Received {stacks!r}.")
        slots = np.zeros((len(stacks), self.max_stack), "int32")
        weights = np.zeros((len(stacks), self.max_stack), "float32")
        with self._guard:
            for row, value in enumerate(stacks):
                for column, (resident, weight) in enumerate(self._entries(value)):
                    slots[row, column], weights[row, column] = resident.slot, weight
        return Selection(slots, weights)

    def key(self, stack: Any) -> tuple[tuple[str, float], ...]:
        """(digest, weight) of each adapter of a stack: what a cache of results may go by."""
        return tuple((resident.adapter.digest, weight) for resident, weight in self._entries(stack))

    def _entries(self, value: Any) -> list[tuple[Resident, float]]:
        if isinstance(value, Lease):
            if value.released:
                raise ValueError(f"The lease of {value.stack!r} was released. Take another one.")
            return list(value.entries)
        return self._table.residents_of(self._short(as_stack(value)))

    def _short(self, stack: Stack) -> Stack:
        if len(stack) > self.max_stack:
            raise ValueError(f"A stack must have at most {self.max_stack} adapters (`max_stack`). Received {stack!r}.")
        return stack

    def _leased(self, stack: Stack) -> Lease:
        entries = self._table.residents_of(stack)
        for resident, _ in entries:
            resident.leases += 1
        return Lease(stack, entries, self._release)

    def _release(self, lease: Lease) -> None:
        with self._guard:
            for resident, _ in lease.entries:
                resident.leases -= 1
                if resident.retired and not resident.leases:
                    self._vacate(resident)
