#!/usr/bin/env python
"""Write RESULTS.md, the README's table of methods, and the results of the method cards from results/*.json.

generate.py           write what has changed
generate.py --check   write nothing; print a diff and exit with 1 where a file is out of date
"""

import argparse
import sys
from pathlib import Path

from assay.bench.results import differences, generated
from assay.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Parse, generate, and give the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    args = parser.parse_args()
    root = args.root.resolve()
    try:
        texts = generated(root)
    except InputError as e:
        print(f"generate.py: {e}", file=sys.stderr)
        return 1
    stale = differences(texts, root)
    if args.check:
        print("\n".join(stale) or "Everything that is generated is up to date.")
        if stale:
            print(f"generate.py: {len(stale)} out of date; run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
