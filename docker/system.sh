#!/bin/sh
# Install the system packages of one stage of the image, on a Debian or Ubuntu base:
#   system.sh build   what compiling Horovod needs
#   system.sh run     what running a job needs
#   system.sh user    the user that jobs run as, number 1000, with /workspace its own
set -eu

if [ "${1:-}" = user ]; then
    # Ubuntu's base has a user of that number already.
    taken=$(getent passwd 1000 | cut -d: -f1)
    [ -z "$taken" ] || [ "$taken" = star ] || userdel --remove "$taken"
    useradd --create-home --uid 1000 --shell /bin/bash star
    install -d -o star -g star /workspace
    exit 0
fi

# The base may bring its own Python (python:3.11-slim) or none (plain Debian).
packages=""
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    packages="python3 python3-venv"
fi
case $1 in
build)
    packages="$packages g++ make cmake"
    header='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    python3 -c "$header" 2>/dev/null || packages="$packages python3-dev"
    ;;
run)
    # ssh: horovodrun starts the ranks of other hosts through it. libgomp1: torch, LightGBM.
    # iproute2: telemetry reads link speeds with it.
    packages="$packages ca-certificates libgomp1 iproute2 openssh-server openssh-client"
    ;;
*)
    echo "system.sh: got '$1', expected 'build', 'run' or 'user'" >&2
    exit 2
    ;;
esac

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086  # a list of words
apt-get install -q -y --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
# Installing sshd makes host keys. In an image they would be shared by everyone who
# has it; the entry point installs the job's own, from STAR_SSH_KEYS.
rm -f /etc/ssh/ssh_host_*
