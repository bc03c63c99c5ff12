"""`kdo verify` and `kdo card`: records of runs, lineages, teacher stores."""

import argparse
import sys


def verify(options: argparse.Namespace) -> int:
    """Print what holds and what does not; 0 if all holds, 1 if not, 2 if there is nothing to verify."""
    from keras_diffusion_opd.provenance import Lineage, RunRecord, verify_path
    from keras_diffusion_opd.provenance.row_manifest import Manifest

    try:
        results = verify_path(options.path)
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
        if isinstance(found.record, Lineage):
            names = " -> ".join(link.name for link in found.record.links)
            print(f"  head {found.record.head}: {names or 'no models'}")
        if isinstance(found.record, Manifest):
            rows, shards = found.record.rows, len(found.record.shards)
            print(f"  store {found.record.digest}: {rows} rows in {shards} shards")
    broken = sum(len(found.problems) for found in results)
    print("Everything holds." if not broken else f"{broken} of the things recorded do not hold.")
    return 1 if broken else 0


def card(options: argparse.Namespace) -> int:
    """Print the model card or write it; 1 if the record does not hold, 2 if there is none."""
    from keras_diffusion_opd.provenance import ModelCard, RunRecord, verify_path
    from keras_diffusion_opd.provenance.row_manifest import Manifest

    try:
        found = verify_path(options.path)[0]
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
