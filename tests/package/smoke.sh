#!/usr/bin/env bash
# Try an installed torch-isda: smoke.sh FOLDER_OF_PYTHON. Runs outside the repository.
set -euo pipefail
unset PYTHONPATH
bin=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/user_project.py" "$work"
cd "$work"
"$bin/python" -c 'import isda, sys; sys.exit("site-packages" not in isda.__file__ and isda.__file__)'
"$bin/python" user_project.py
"$bin/mypy" --strict user_project.py
"$bin/isda" --help | grep "usage: isda COMMAND"
"$bin/isda" --version
"$bin/python" -m isda --version
# without the extra, a command that needs it names it
if "$bin/isda" list 2>error; then echo "isda list ran without the extra" >&2; exit 1; fi
grep -q "experiments" error
