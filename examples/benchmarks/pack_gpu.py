# SPDX-License-Identifier: Apache-2.0
"""Pack what a GPU machine without network needs: this checkout, and wheels of all requirements.

    python examples/benchmarks/pack_gpu.py FOLDER [--extras cuda,test]
    python examples/benchmarks/pack_gpu.py FOLDER --list      # downloads and writes nothing

Needs a network and pip, nothing else. Copy the folder to the machine, with the same minor version
of Python and the same CPU architecture, and run its ``install.sh``. PyTorch, which allocates inputs
and times in the benchmarks, is not among the wheels, since it takes several GB: the environment
sees that of the machine. Exit code: 0, or 1 if pip finds no wheel of a requirement.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT, WHEELS = "tvm-fusion", "wheels"
EXTRAS = "cuda,test"

_INSTALL = """\
#!/bin/sh
# Makes an environment beside this file, without a network:  ./install.sh [PYTHON]
# It needs Python {version} on {machine}, and sees the packages of that Python, such as PyTorch.
set -eu
cd "$(dirname "$0")"
python=${{1:-python3}}
"$python" -c 'import platform, sys
found = "%d.%d on " % sys.version_info[:2] + platform.machine()
sys.exit(found != "{version} on {machine}" and
         "the wheels are for Python {version} on {machine}, not " + found)'
"$python" -m venv --system-site-packages .venv
pip() {{
  .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-index \\
    --find-links {wheels} --constraint {checkout}/requirements.lock "$@"
}}
pip setuptools
pip --no-build-isolation --editable '{checkout}[{extras}]'
echo "make -C {checkout} bench-gpu PYTHON=$PWD/.venv/bin/python"
"""


def checkout_files(root: Path) -> list[Path]:
    """Files of a checkout that git does not ignore, as paths relative to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    found = (Path(name) for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in found if (root / path).is_file()]  # without those that were deleted


def download_command(root: Path, folder: Path, extras: str) -> list[str]:
    """Command that puts the wheels of a checkout's requirements into a folder, as locked."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    options = ["--only-binary", ":all:", "--constraint", str(root / "requirements.lock")]
    return [*pip, *options, "--dest", str(folder / WHEELS), "setuptools", f"{root}[{extras}]"]


def install_script(extras: str) -> str:
    """Text of the script that installs a packed folder."""
    return _INSTALL.format(
        version="{}.{}".format(*sys.version_info[:2]),
        machine=platform.machine(),
        wheels=WHEELS,
        checkout=CHECKOUT,
        extras=extras,
    )


def pack(root: Path, folder: Path, extras: str, files: Sequence[Path]) -> int:
    """Fill a folder with the wheels, then the files and the script; returns pip's exit code."""
    code = subprocess.run(download_command(root, folder, extras)).returncode
    if code:
        return code
    for path in files:
        target = folder / CHECKOUT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target)
    script = folder / "install.sh"
    script.write_text(install_script(extras))
    script.chmod(0o755)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or list what would be packed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")
    parser.add_argument("--extras", default=EXTRAS, help=f"of the package (default: {EXTRAS})")
    parser.add_argument("--list", action="store_true", help="print the files and pip's command")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{folder} exists already, and is no empty folder")
    files = checkout_files(ROOT)
    if options.list:
        print(*files, sep="\n")
        print(*download_command(ROOT, folder, options.extras))
        return 0
    if pack(ROOT, folder, options.extras, files):
        print("pack_gpu: pip found no wheel of a requirement, see above", file=sys.stderr)
        return 1
    wheels = [path.stat().st_size for path in (folder / WHEELS).iterdir()]
    print(f"{folder}: {len(files)} files, {len(wheels)} wheels of {sum(wheels) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
