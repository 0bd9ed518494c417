# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs TRL's own tests of its trainers with this package's trainers in their place.

    python tests/trl_suite CHECKOUT            # a checkout of TRL near the installed version
    python tests/trl_suite CHECKOUT dpo kto    # these trainers only
    python tests/trl_suite CHECKOUT --trl      # TRL's own trainers, with the same stand-ins

Prints how many tests pass, of all and of those that touch a swapped class, and what fails and isn't listed in
`known.py` with its error, or is listed and passes. Fails if there is any, or if pytest ends before all tests have run.
"""

import argparse
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trl_suite.suite import FILES, known_failures, run, summary, unexpected  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL near the installed version")
    parser.add_argument("trainers", nargs="*", metavar="trainer", help=f"some of {', '.join(FILES)}; by default all")
    parser.add_argument("--trl", action="store_true", help="run TRL's own trainers")
    parser.add_argument("--no-self-check", action="store_true", help="use `self_check=False`")
    parser.add_argument("-k", default="", help="only tests whose names match, as for pytest")
    parser.add_argument("--work", type=Path, help="folder for stand-ins and logs, which another run uses again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = (arguments.work or Path(folder)).resolve()
        results = run(
            arguments.checkout.resolve(),
            work,
            arguments.trainers or [*FILES],
            with_trl=arguments.trl,
            self_check=not arguments.no_self_check,
            select=arguments.k,
        )
    known = known_failures(with_trl=arguments.trl, self_check=not arguments.no_self_check)
    print("\n".join(summary(results)))
    lines = unexpected(results, known)
    for name, line in lines.items():
        print(f"  {name}: {line}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
