"""`kdo verify`, `kdo card`, `kdo lineage` and `kdo diff`: records of runs, lineages, checkpoints, stores, adapters."""

import argparse
import sys
from pathlib import Path


def verify(options: argparse.Namespace) -> int:
    """Print what holds and what does not; 0 if all holds, 1 if not, 2 if there is nothing to verify."""
    from keras_diffusion_opd.cli.adapter_files import verify_adapters
    from keras_diffusion_opd.provenance import Lineage, RunRecord, verify_path
    from keras_diffusion_opd.provenance.row_manifest import Manifest

    try:
        results = verify_adapters(Path(options.path))
        if not results or Path(options.path).is_dir():
            try:
                results += verify_path(options.path)
            except FileNotFoundError:  # adapters alone
                if not results:
                    raise
    except OSError as error:
        print(f"kdo verify: {error}", file=sys.stderr)
        return 2
    for found in results:
        print(f"{found.path} ({(found.kind or 'unknown').replace('_', ' ')})")
        for problem in found.problems:
            print(f"  DOES NOT HOLD: {problem}")
        if isinstance(found.record, RunRecord):
            record = found.record
            print(f"  record {record.digest}: {len(record.files)} files, {len(record.digests)} digests")
        if found.digest is not None:
            print(f"  record {found.digest}")
        if isinstance(found.record, Lineage):
            names = " -> ".join(link.name for link in found.record.links)
            print(f"  head {found.record.head}: {names or 'no models'}")
        if isinstance(found.record, Manifest):
            rows, shards = found.record.rows, len(found.record.shards)
            print(f"  store {found.record.digest}: {rows} rows in {shards} shards")
    wanted = getattr(options, "record", None)
    if wanted is not None and wanted not in (results[-1].digest, getattr(results[-1].record, "digest", None)):
        print(f"  DOES NOT HOLD: the newest record should have the digest {wanted}")
        results[-1].problems.append("another record")
    broken = sum(len(found.problems) for found in results)
    print("Everything holds." if not broken else f"{broken} of the things recorded do not hold.")
    return 1 if broken else 0


def card(options: argparse.Namespace) -> int:
    """Print the model card or write it; 1 if the record does not hold, 2 if there is none."""
    from keras_diffusion_opd.provenance import ModelCard, RunRecord, verify_path
    from keras_diffusion_opd.provenance.row_manifest import Manifest

    try:
        results = verify_path(options.path)
        found = results[-1] if results[-1].kind == "checkpoint" else results[0]
    except OSError as error:
        print(f"kdo card: {error}", file=sys.stderr)
        return 2
    for problem in found.problems:
        print(f"kdo card: {found.path} DOES NOT HOLD: {problem}", file=sys.stderr)
    if found.record is None:
        return 1
    if isinstance(found.record, Manifest):
        print("kdo card: a store of teacher targets is no model, and has no card.", file=sys.stderr)
        return 2
    if isinstance(found.record, RunRecord):
        made = ModelCard.from_record(found.record)
    else:
        made = ModelCard.from_lineage(found.record)
    try:
        if options.output:
            made.save(options.output)
        else:
            print(made.to_markdown(), end="")
    except OSError as error:
        print(f"kdo card: cannot write {options.output}: {error}", file=sys.stderr)
        return 2
    return 1 if found.problems else 0


def lineage(options: argparse.Namespace) -> int:
    """Print the models from the first ancestor to the last; 1 if the record does not hold, 2 if there is none."""
    from keras_diffusion_opd.provenance import Lineage, RunRecord, lineage_diagram, verify_path

    try:
        found = verify_path(options.path)[-1]
    except OSError as error:
        print(f"kdo lineage: {error}", file=sys.stderr)
        return 2
    for problem in found.problems:
        print(f"kdo lineage: {found.path} DOES NOT HOLD: {problem}", file=sys.stderr)
    chain = found.record.lineage if isinstance(found.record, RunRecord) else found.record
    if not isinstance(chain, Lineage):
        print(f"kdo lineage: {found.path} holds no lineage", file=sys.stderr)
        return 1
    for link in chain.links:
        print(f"{link.name}\n  weights {link.model}\n  link    {link.digest}\n  method  {link.recipe.method}")
        for parent in link.recipe.parents:
            print(f"  parent  {parent.role} {parent.name} {parent.digest}")
        for change in link.recipe.allowed:
            print(
                f"  allowed {change['name']}: {change['before']!r} -> {change['after']!r}, after "
                f"{change['updates']} updates"
            )
    print(lineage_diagram(chain))
    return 1 if found.problems else 0


def diff(options: argparse.Namespace) -> int:
    """Print in what two checkpoints differ; 0 if in nothing, 1 if in something, 2 if they cannot be compared."""
    from keras_diffusion_opd.provenance.checkpoint_diff import diff_checkpoints
    from keras_diffusion_opd.provenance.checkpoints import places

    try:
        paths = []
        for path in (Path(options.a), Path(options.b)):
            inside = places(path) if path.is_dir() else []
            paths.append(inside[-1].path if inside else path)
        settings, tensors = diff_checkpoints(*paths)
    except (OSError, ValueError) as error:
        print(f"kdo diff: {error}", file=sys.stderr)
        return 2
    for setting in settings:
        change = setting.to_json()
        print(f"{setting.name.removeprefix('checkpoint.')}: {change['before']!r} -> {change['after']!r}")
    for tensor in tensors:
        numbers = "" if tensor.largest is None else f"largest {tensor.largest:.3e}"
        numbers += "" if tensor.relative is None else f", relative {tensor.relative:.3e}"
        said = "; ".join(part for part in (numbers, tensor.note) if part)
        print(f"{tensor.section}/{tensor.path}: {said}")
    print(f"{len(settings)} settings and {len(tensors)} tensors differ.")
    return 1 if settings or tensors else 0
