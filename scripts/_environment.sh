# Sourced by the scripts beside it. Afterwards $root is the checkout and $python its own Python, with what is needed.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh" run    # or: dev
#
# The environment is .venv in the checkout. A stamp inside it says what was installed, so that a second run is quick.
# Another Python than python3: PYTHON=/path/to/python scripts/test

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"

# All that decides what is installed: the lists, the project's own dependencies, and where the checkout lies.
wanted() { { cat "$root"/requirements/*.txt "$root/pyproject.toml"; echo "$root"; } | cksum; }

holds() { [ -x "$python" ] && [ "$(cat "$root/.venv/installed-$1" 2>/dev/null)" = "$(wanted)" ]; }

prepare() {
    if holds "$1" || holds dev; then return; fi
    local base="${PYTHON:-python3}"
    if ! "$python" -c '' 2>/dev/null; then
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "Python 3.11 or newer is needed, but '$base' is none; type PYTHON=python3.11 $0" >&2
            exit 2
        fi
        echo "making $root/.venv" >&2
        "$base" -m venv --clear "$root/.venv"
    fi
    echo "installing requirements/$1.txt (a minute or two, once)" >&2
    rm -f "$root/.venv/installed-$1"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -r "$root/requirements/$1.txt"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input \
        --no-build-isolation --no-deps --editable "$root"
    wanted >"$root/.venv/installed-$1"
}

prepare "$1"
