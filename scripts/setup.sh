#!/usr/bin/env bash
# Creates .venv in the repository root with torch and this project (editable, with the development
# tools), and prints the progress of compiling its kernels. Running it again updates everything.
#   PYTHON  the interpreter of a new .venv (default python3; 3.11 or later)
#   TORCH   the torch requirement (default torch==2.13.0; 2.11 or later). A torch that is already in
#           .venv and satisfies it is kept, for example a CUDA build of your choice.
#   EXTRAS  this project's extras to install (default dev)
#   PRUNED_RNNT_CUDA_ARCHITECTURES   see csrc/CMakeLists.txt (default: those of this machine's GPUs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if ! .venv/bin/python -c "$is_new_enough" 2>/dev/null; then
  python="${PYTHON:-python3}"
  if ! "$python" -c "$is_new_enough"; then
    echo "$python is not Python 3.11 or later: set PYTHON to one that is" >&2
    exit 1
  fi
  if [ -e .venv ]; then
    old="$(mktemp -d .venv.old.XXXX)"
    echo "moving .venv to $old: its Python does not start, or is older than 3.11" >&2
    mv .venv "$old"
  fi
  "$python" -m venv .venv
elif ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  .venv/bin/python -m ensurepip # as after a first run without Debian's python3-venv
fi
# The build tools stay in .venv. pip's own environment for a build is a new folder each time, after
# which all kernels would be compiled again.
export PATH="$PWD/.venv/bin:$PATH"
python -m pip install --quiet "${TORCH:-torch==2.13.0}" 'scikit-build-core>=0.11'
missing="from scikit_build_core.build import get_requires_for_build_editable as get; print(*get())"
tools="$(python -c "$missing")"
for tool in $tools; do
  python -m pip install --quiet "$tool"
done

# pip shows the output of the compilation with --verbose only, among much else.
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
SECONDS=0
if ! python -m pip install --verbose --no-build-isolation --editable ".[${EXTRAS:-dev}]" 2>&1 |
  tee "$log" |
  sed -nuE 's/.*(-- pruned_rnnt: .*)/\1/p; s/.*(\[[0-9 ]+[/%][0-9]*\]) (Build|Compil|Link)ing.*[ /](.+)/\1 \3/p'; then
  tail -n 60 "$log" >&2
  exit 1
fi
echo "installed this project in $SECONDS s"
python -c 'import pruned_rnnt; print(pruned_rnnt.backend_report())'
