"""Which adapter lies in which slot, who uses it, and which slot is free."""

import dataclasses
from collections.abc import Callable, Iterator

from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.stack import Stack


@dataclasses.dataclass
class Resident:
    """An adapter in a slot.

    Args:
        adapter: what lies there.
        slot: 1 to the number of slots.
        leases: how many use it.
        retired: whether its name is gone: the slot is freed when the last lease ends.
        used: a clock of its last use.
    """

    adapter: Adapter
    slot: int
    leases: int = 0
    retired: bool = False
    used: int = 0


class SlotTable:
    """The bookkeeping of a bank, without any arrays.

    Args:
        slots: number of slots besides slot 0.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.by_name: dict[str, Resident] = {}
        self.retired: list[Resident] = []
        # The slot that has been free the longest is taken first, so that what was prepared for a former tenant
        # and runs too late meets zeros rather than another tenant.
        self._free = list(range(1, slots + 1))
        self._clock = 0

    def __iter__(self) -> Iterator[Resident]:
        yield from self.by_name.values()
        yield from self.retired

    @property
    def leased(self) -> list[str]:
        """Names of adapters that are in use."""
        return sorted({resident.adapter.name for resident in self if resident.leases})

    def find(self, name: str) -> Resident:
        """The adapter of a name, now used; KeyError with what is there."""
        if name not in self.by_name:
            raise KeyError(
                f"No adapter {name!r} is in the bank. There are {sorted(self.by_name) or 'none'}: add it with `add`."
            )
        resident = self.by_name[name]
        self._clock += 1
        resident.used = self._clock
        return resident

    def room_for(self, name: str, evict: bool) -> tuple[int, Resident | None]:
        """A slot for the adapter `name`, and who has to leave it; RuntimeError if there is none."""
        if self._free:
            return self._free[0], None
        former = self.by_name.get(name)
        if former is not None and not former.leases:
            return former.slot, former
        idle = sorted((r for r in self.by_name.values() if not r.leases), key=lambda r: r.used)
        if evict and idle:
            return idle[0].slot, idle[0]
        mend = f"Pass evict=True to give up {idle[0].adapter.name!r}, or `remove` one." if idle else "Release a lease."
        raise RuntimeError(f"All {self.slots} slots are taken, {self.slots - len(idle)} of them leased. {mend}")

    def put(self, adapter: Adapter, slot: int, leaving: Resident | None) -> Resident:
        """Enter an adapter into a slot from `room_for`."""
        if leaving is not None:
            del self.by_name[leaving.adapter.name]
        else:
            self._free.remove(slot)
        self._clock += 1
        self.by_name[adapter.name] = Resident(adapter, slot, used=self._clock)
        return self.by_name[adapter.name]

    def retire(self, name: str) -> Resident | None:
        """Take the name away; the resident, if its slot is free at once."""
        resident = self.by_name.pop(name)
        if resident.leases:
            resident.retired = True
            self.retired.append(resident)
            return None
        return resident

    def free(self, resident: Resident) -> None:
        """Hand the slot back."""
        if resident in self.retired:
            self.retired.remove(resident)
        self._free.append(resident.slot)

    def residents_of(self, stack: Stack) -> list[tuple[Resident, float]]:
        """(resident, weight) in the order of the stack."""
        return [(self.find(name), weight) for name, weight in stack]


class Lease:
    """A stack whose slots stay what they are until `release`; made by `AdapterBank.lease`.

    A context manager. What is removed or replaced in the meantime stays where it is for this lease.

    Args:
        stack: what is leased.
        entries: (resident, weight).
        release: called once, with this lease.

    Example:

    ```python
    import keras
    import keras_diffusion_opd as kdo

    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    bank = kdo.adapters.AdapterBank(base, ".*", slots=1)
    bank.add(kdo.adapters.Adapter.initial("mine", base, ".*", rank=2))
    with bank.lease("mine") as lease:
        bank.remove("mine")  # no new request finds it; this one keeps it
        selection = bank.select([lease])
    assert bank.names == []
    ```
    """

    def __init__(self, stack: Stack, entries: list[tuple[Resident, float]], release: Callable[["Lease"], None]) -> None:
        self.stack = stack
        self.entries = tuple(entries)
        self._release = release
        self.released = False

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        """(digest of the adapter, weight): what a cache may go by."""
        return tuple((resident.adapter.digest, weight) for resident, weight in self.entries)

    def release(self) -> None:
        """Give the slots back; a second time does nothing."""
        if not self.released:
            self.released = True
            self._release(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
