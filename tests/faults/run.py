# SPDX-License-Identifier: Apache-2.0
"""Seeds the faults of ``seeded.py``, one at a time, and tells which of them the quick tests catch.

The repository's files are copied to a temporary folder, with local changes, and only the copy is
edited. First the tests run without a fault. Results are kept: a second call goes on where the
first one ended, as long as neither fault nor tests of the list have changed. Exit status: 0 if
all were caught, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.seeded import FAULTS, Fault  # noqa: E402

RESULTS = ROOT / ".pytest_cache" / "faults.json"
OPTIONS = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header")
PASSED, FAILED = 0, 1  # exit statuses of pytest; others mean that the tests did not run


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def run_tests(folder: Path, tests: tuple[str, ...], limit: float) -> tuple[str, str]:
    """Run tests of a copy; return ``passed``, ``failed``, ``hung`` or ``broken``, and where."""
    env = os.environ | {"PYTHONPATH": str(folder), "CI": "true"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "hung", f"no end in {limit:.0f} s"
    if done.returncode == PASSED:
        return "passed", ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == FAILED or "Fatal Python error" in done.stderr:
        return "failed", found[1] if found else "the process crashed"
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return "broken", " ".join(last)


def seed(folder: Path, fault: Fault, limit: float) -> dict[str, Any]:
    """Run a fault's tests with the fault, and take it back."""
    path = folder / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        return {"outcome": "broken", "by": f"{fault.file} has not this text once: {fault.old!r}"}
    begin = time.monotonic()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        outcome, by = run_tests(folder, fault.tests, limit)
    finally:
        path.write_text(text)
    return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of faults")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--unchecked", action="store_true", help="do not run tests without a fault")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of a fault")
    found = parser.parse_args(arguments)
    wrong = [number for number in found.only or [] if not 1 <= number <= len(FAULTS)]
    if wrong:
        parser.error(f"there is no fault {wrong[0]}; expected 1 to {len(FAULTS)}")
    return found


def store(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.partial")
    aside.write_text(json.dumps(results, indent=1))
    aside.replace(path)


def show(results: dict[str, Any], chosen: dict[int, Fault]) -> None:
    """Print a line for each fault."""
    names = {"failed": "caught", "passed": "NOT CAUGHT", "hung": "HUNG", "broken": "BROKEN"}
    for number, fault in chosen.items():
        result = results[fault.name]
        print(f"{number:3} {names[result['outcome']]:10} {fault.name}: {result['by']}")
    caught = sum(results[fault.name]["outcome"] == "failed" for fault in chosen.values())
    print(f"{caught} of {len(chosen)} caught")


def main(arguments: list[str] | None = None) -> int:
    """Seed the chosen faults that have no result yet."""
    asked = parse(arguments)
    numbers = asked.only or range(1, len(FAULTS) + 1)
    chosen = {number: FAULTS[number - 1] for number in numbers}
    known = asked.results.is_file() and not asked.fresh
    results: dict[str, Any] = json.loads(asked.results.read_text()) if known else {}
    left = [
        fault
        for fault in chosen.values()
        if results.get(fault.name, {}).get("fault") != json.loads(json.dumps(asdict(fault)))
    ]
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        copy_repository(folder)
        if left and not asked.unchecked:
            tests = tuple(sorted({test for fault in left for test in fault.tests}))
            outcome, by = run_tests(folder, tests, asked.limit * len(left))
            if outcome != "passed":
                print(f"without a fault the tests do not pass: {by}", file=sys.stderr)
                return 2
        for fault in left:
            results[fault.name] = seed(folder, fault, asked.limit) | {"fault": asdict(fault)}
            store(asked.results, results)
            print(f"{results[fault.name]['outcome']}: {fault.name}", file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps({number: results[fault.name] for number, fault in chosen.items()}))
    else:
        show(results, chosen)
    return int(any(results[fault.name]["outcome"] != "failed" for fault in chosen.values()))


if __name__ == "__main__":
    sys.exit(main())
