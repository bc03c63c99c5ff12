"""Files that are there in full or not at all: temporary name, fsync, rename, fsync of the directory."""

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from keras_diffusion_opd.provenance.canonical import plain_json

# The largest JSON file that is read: far above any record, far below what would fill the memory.
LARGEST_JSON = 64 * 2**20


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that a crash at any moment leaves as it was or as it shall be, never half.

    Args:
        path: the file; its directory must exist. What is there already is replaced.
        data: the content.

    Raises:
        OSError: no such directory, no permission, no space; nothing is changed and nothing left over.

    Example:
        >>> from pathlib import Path
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.write_bytes("weights.bin", b"123")
        >>> Path("weights.bin").read_bytes()
        b'123'
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, in full or not at all.

    Args:
        path: the file; its directory must exist.
        value: as for `canonical_json`.

    Raises:
        TypeError: a value or key that JSON does not have.
        ValueError: a number that is not finite. Nothing is written in either case.
        OSError: as for `write_bytes`.

    Example:
        >>> from pathlib import Path
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.write_json("run.json", {"seed": 0})
        >>> print(Path("run.json").read_text(), end="")
        {
          "seed": 0
        }
    """
    text = json.dumps(plain_json(value, name=Path(path).name), indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file of at most 64 MiB, strictly read.

    Args:
        path: the file.

    Returns:
        The value.

    Raises:
        OSError: the file is not there or cannot be read.
        ValueError: larger than 64 MiB, not JSON, a key given twice, or NaN and the like.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.write_json("run.json", {"seed": 0})
        >>> kdo.provenance.read_json("run.json")
        {'seed': 0}
    """
    with open(path, "rb") as file:
        # Not more than there is: `read` makes room for all that it is asked for.
        data = file.read(min(os.fstat(file.fileno()).st_size, LARGEST_JSON) + 1)
        return parse_json(data, path)


def parse_json(data: bytes, path: str | os.PathLike[str]) -> Any:
    """The value of JSON text in UTF-8, as strictly as `read_json`; `path` is named in errors."""
    if len(data) > LARGEST_JSON:
        raise ValueError(f"{path} must be at most {LARGEST_JSON} bytes to be read as JSON. It is larger.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key is given twice")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file. It does not read as one: {error}.") from error


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the bytes of a file, as 64 hexadecimal digits.

    Args:
        path: the file.

    Returns:
        The digest.

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.write_bytes("empty", b"")
        >>> kdo.provenance.file_digest("empty")[:12]
        'e3b0c44298fc'
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading that must be a file itself: a link leads elsewhere, and a pipe never ends.

    Raises:
        ValueError: a link, a directory, a device.
        OSError: the file cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.path.islink(path):
        raise ValueError(f"{path} must be a file. It is a symbolic link: put the file itself there.")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} must be a file. It is something else.")
    return os.fdopen(descriptor, "rb", buffering=0)


def remove_left_over(folder: Path, name: str) -> None:
    """Remove what a process that was killed while it wrote the file `name` has left beside it."""
    for path in folder.glob(f".{glob.escape(name)}.*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a directory that appears under its name only when it is complete and on the disk.

    Args:
        path: the directory to make; it must not exist, and its parent must.

    Yields:
        A temporary directory beside it, renamed to `path` at the end of the block, or removed on an error.

    Raises:
        FileExistsError: `path` exists.
        OSError: no permission, no space; nothing is left over.

    Example:
        >>> from pathlib import Path
        >>> import keras_diffusion_opd as kdo
        >>> with kdo.provenance.new_directory("checkpoint-8") as folder:
        ...     _ = (folder / "state").write_text("complete")
        ...     Path("checkpoint-8").exists()
        False
        >>> Path("checkpoint-8/state").read_text()
        'complete'
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"`path` must not exist yet. Received {path}: choose another name.")
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                with open(Path(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_directory(Path(folder))
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power, on the systems that can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    """A hidden name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
