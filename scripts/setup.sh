#!/usr/bin/env bash
# Set up this checkout: a virtual environment, torch, the project and the patched
# Horovod. Called by `make setup`; every step is repeatable.
#
#   PYTHON           interpreter to start from (python3)
#   VENV             folder of the environment (.venv)
#   TORCH_SPEC       what pip installs as torch (torch==2.13.0)
#   TORCH_INDEX_URL  one more package index, for torch alone (none)
#   EXTRAS           extras of the project to install (dev,train,bench)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
TORCH_INDEX_URL=${TORCH_INDEX_URL:-}
EXTRAS=${EXTRAS:-dev,train,bench}
log=$VENV/setup.log

fail() {
    echo "[setup] error: $*" >&2
    exit 2
}

# attempt WHAT COMMAND...: run quietly, with a progress line every ten seconds.
attempt() {
    local what=$1 start=$SECONDS shown=0
    shift
    echo "[setup] $what"
    "$@" >"$log" 2>&1 &
    local child=$!
    # The shell has the child ignore Ctrl-C: it would go on installing.
    trap 'kill "$child" 2>/dev/null || true; wait "$child" || true; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - start >= shown + 10)); then
            shown=$((SECONDS - start))
            echo "[setup] $what: $shown s"
        fi
    done
    trap - INT TERM
    wait "$child"
}

failed() {
    tail -n 30 "$log" >&2
    echo "[setup] error: '$1' failed; the whole log: $PWD/$log" >&2
    exit 1
}

# step WHAT COMMAND...: the same; on failure show the end of the log and exit.
step() {
    attempt "$@" || failed "$1"
}

command -v "$PYTHON" >/dev/null || fail "$PYTHON was not found: apt-get install python3 python3-venv (or set PYTHON=)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1), expected Python 3.10 or later: install it and set PYTHON="
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON lacks its venv module: apt-get install python3-venv (or set PYTHON= to one that has it)"

python=$VENV/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    if [ -e "$VENV" ] && [ -n "$(ls -A "$VENV")" ] && [ ! -e "$log" ]; then
        fail "$VENV exists, has no pip, and is not of an earlier make setup: remove it, or set VENV= to another folder"
    fi
    echo "[setup] making $VENV"
    "$PYTHON" -m venv --clear "$VENV"
fi

pip_install=("$python" -m pip --disable-pip-version-check install)
# Install everything but torch with the hashes of requirements.lock, if that is for this
# Python and machine. A wrong hash ends the setup; an archive missing on the index does
# not.
install_locked() {
    local reason what="installing what requirements.lock has, hashes checked"
    if [ "$EXTRAS" != dev,train,bench ]; then
        reason="requirements.lock is for EXTRAS=dev,train,bench"
    elif reason=$("$python" scripts/lock.py fits); then
        attempt "$what" "${pip_install[@]}" --no-deps --require-hashes --requirement requirements.lock && return
        ! grep -q "DO NOT MATCH THE HASHES" "$log" || failed "$what"
        reason="the package index does not have all of requirements.lock: $(grep -m 1 '^ERROR' "$log" || echo "see $log")"
    fi
    echo "[setup] hashes are not checked: $reason"
    return 1
}

locked=no
! install_locked || locked=yes
# torch before the project: if it were not installed yet, pip would choose the newest one.
step "installing $TORCH_SPEC" "${pip_install[@]}" "$TORCH_SPEC" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
# Horovod's build and the editable install both use the environment's setuptools.
if [ "$locked" = yes ]; then
    step "installing star-hvd" "${pip_install[@]}" --no-build-isolation --no-deps --editable .
else
    step "installing the build tools" "${pip_install[@]}" "setuptools<81" wheel
    step "installing star-hvd[$EXTRAS]" "${pip_install[@]}" --no-build-isolation --editable ".[$EXTRAS]"
fi
"$python" scripts/build_horovod.py
