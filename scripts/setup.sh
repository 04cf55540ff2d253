# Sourced by the other scripts: make_venv DIR EXTRAS creates (or reuses) a virtual environment with this project in it.
# PYTHON chooses the interpreter (default: python3); it must be 3.11 or newer.

make_venv() {
  local dir=$1 extras=$2 python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is not Python 3.11 or newer; set PYTHON to one that is" >&2
    return 1
  fi
  # The stamp holds what the environment was made from; another interpreter or pyproject makes it anew.
  local stamp
  stamp=$("$python" -c 'import sys; print(sys.version)'; echo "$extras"; cat pyproject.toml)
  if [ ! -x "$dir/bin/python" ] || [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "setting up $dir (the project with [$extras]) ..."
    "$python" -m venv --clear "$dir"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    printf '%s\n' "$stamp" > "$dir/.stamp"
  fi
}
