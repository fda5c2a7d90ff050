# Sourced by the scripts beside it: makes the project's own environment, .venv, and keeps to it.
#
#   make_environment serve    what the server and the terminal client need
#   make_environment dev      that, and what tests and checks need
#
# A stamp says what .venv was made from, so that nothing is done while it is current. It is written last:
# an interrupted installation is taken up again. PYTHON names the interpreter to begin with (3.11+).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

# Nothing from outside the environment may be imported.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1

make_environment() {
    local wanted=$1 current
    current="$root $(cksum <"$root/pyproject.toml")"
    if _is_current dev "$current" || _is_current "$wanted" "$current"; then
        return 0
    fi
    echo "making the environment in .venv; the first time takes a few minutes" >&2
    _make_venv
    local extra=client
    if [ "$wanted" = dev ]; then extra=dev; fi
    "$python" -m pip install --quiet --editable "$root[$extra]" </dev/null >&2
    # Stamps of another pyproject.toml say nothing any more.
    rm -f "$venv"/made-from-*
    printf '%s\n' "$current" >"$venv/made-from-$wanted"
}

_is_current() {
    local stamp=$venv/made-from-$1
    [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$2" ]
}

_make_venv() {
    # A folder that was moved or only half made is made anew; a sound one is kept.
    if [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1 &&
        [ "$("$python" -c 'import sys; print(sys.prefix)')" = "$venv" ]; then
        return 0
    fi
    local base=${PYTHON:-python3}
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "Python 3.11 or newer is needed; PYTHON=/path/to/python names one" >&2
        return 1
    fi
    "$base" -m venv --clear "$venv"
}
