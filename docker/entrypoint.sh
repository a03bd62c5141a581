#!/bin/sh
# Run a command in the image. With STAR_SSHD=1, or with the command `sshd`, an SSH
# server runs beside it, so that horovodrun on another host can start ranks here.
#
#   STAR_SSH_PORT         port of the server (2222: with --network=host the host has 22)
#   STAR_SSH_KEYS         folder, mounted by you, with id_ed25519 and id_ed25519.pub:
#                         one key pair for the whole job (/run/star-ssh)
set -eu

port=${STAR_SSH_PORT:-2222}
keys=${STAR_SSH_KEYS:-/run/star-ssh}

prepare_ssh() {
    if [ ! -r "$keys/id_ed25519.pub" ]; then
        echo "entrypoint: got no $keys/id_ed25519.pub, expected the job's key pair: make one with" \
            "ssh-keygen -t ed25519 -N '' -f id_ed25519 and mount its folder there" >&2
        exit 2
    fi
    mkdir -p -m 700 "$HOME/.ssh" && mkdir -p /run/sshd
    install -m 600 "$keys/id_ed25519.pub" "$HOME/.ssh/authorized_keys"
    [ ! -r "$keys/id_ed25519" ] || install -m 600 "$keys/id_ed25519" "$HOME/.ssh/id_ed25519"
    ssh-keygen -A >/dev/null # host keys of this container alone
}

if [ "${1:-}" = sshd ]; then
    prepare_ssh
    exec /usr/sbin/sshd -D -e -p "$port"
fi
if [ "${STAR_SSHD:-0}" = 1 ]; then
    prepare_ssh
    /usr/sbin/sshd -p "$port"
fi
exec "$@"
