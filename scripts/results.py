#!/usr/bin/env python
"""Measure claims on their default workloads and write results/SLUG.json.

results.py              every claim, at desk scale
results.py rqr kivi     these two
results.py rqr --store trials.sqlite   keep the trials, and go on where an earlier run was interrupted
"""

import argparse
import sys
from pathlib import Path

from assay.bench.claim import SCALES
from assay.bench.results import measure
from assay.errors import InputError, StoreError

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Parse, measure, and give the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="which claims (default: all)")
    parser.add_argument("--scale", choices=SCALES, default="desk", help="how large (default: desk)")
    parser.add_argument("--store", help="file or URL of a store to keep trials in (default: a fresh, temporary one)")
    parser.add_argument("--folder", type=Path, default=ROOT / "results", help="where to write (default: results/)")
    args = parser.parse_args()
    try:
        measure(args.slugs, args.folder, scale=args.scale, store=args.store)
    except (InputError, StoreError) as e:
        print(f"results.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
