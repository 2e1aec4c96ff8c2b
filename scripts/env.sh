# shellcheck shell=bash
# Shared by the other scripts; to be sourced. `ensure_env run` or `ensure_env dev` leaves a .venv
# with exactly the packages of constraints.txt or constraints-dev.txt, each checked against its
# hash, and this checkout installed in place. When nothing changed it does nothing.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "paged-jax needs Python 3.11 or newer, and found none. Install one, or name it:" >&2
    echo "  PYTHON=/path/to/python3 $0" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    echo "Making .venv with $("$python" --version) ..."
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "That Python cannot make virtual environments." >&2
        echo "On Debian and Ubuntu this helps: apt-get install python3-venv" >&2
        return 1
    fi
}

fingerprint() { # fingerprint LOCK: changes when an install is due
    cat pyproject.toml "$1" .venv/pyvenv.cfg | sha256sum | cut -d ' ' -f 1
}

show_progress() { # pip's lines on standard input; the number of packages as the argument
    awk -v total="$1" -v tty="$([ -t 1 ] && echo 1 || echo 0)" '
        /^Ignoring / { total-- }
        /^(Collecting|Processing|Requirement already satisfied:) / {
            count++
            name = $0
            sub(/^(Collecting|Requirement already satisfied:) /, "", name)
            sub(/ .*/, "", name)
            if (/^Processing/) name = "a local file"
            if (tty) printf "\r\033[K  %d of %d  %s", count, total, name
            else if (count % 10 == 0) printf "  %d of %d\n", count, total
            fflush()
        }
        /^Installing collected/ {
            if (tty) printf "\r\033[K"
            print "  unpacking ..."
            fflush()
        }
        END { if (tty) printf "\r\033[K" }'
}

ensure_env() { # ensure_env run|dev
    local kind=$1 lock stamp count
    [ "$kind" = dev ] && lock=constraints-dev.txt || lock=constraints.txt
    stamp=.venv/.installed-$kind
    [ -x .venv/bin/python ] || make_venv
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "$lock")" ]; then
        return
    fi
    count=$(grep -c '==' "$lock")
    echo "Installing up to $count packages into .venv (about 800 MB the first time) ..."
    .venv/bin/python -m pip install --disable-pip-version-check --no-deps --require-hashes \
        -r "$lock" | show_progress "$count"
    .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
        --no-build-isolation --editable .
    .venv/bin/python -m pip check --disable-pip-version-check >/dev/null ||
        { .venv/bin/python -m pip check --disable-pip-version-check >&2; return 1; }
    fingerprint "$lock" >"$stamp"
    # What tests need includes what running needs.
    [ "$kind" != dev ] || fingerprint constraints.txt >.venv/.installed-run
}
