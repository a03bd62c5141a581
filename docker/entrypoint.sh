#!/bin/sh
# Run a command in the image. With STAR_SSHD=1, or with the command `sshd`, an SSH
# server runs beside it, so that horovodrun on another host can start ranks here.
#
#   STAR_SSH_PORT         port of the server (2222: with --network=host the host has 22)
#   STAR_SSH_KEYS         folder, mounted by you, with two key pairs for the whole job
#                         (/run/star-ssh): id_ed25519, by which ranks are let in, and
#                         host_ed25519, by which the hosts are known to each other
#
# Nothing here needs root. A host that does not have the job's host key is refused.
set -eu

port=${STAR_SSH_PORT:-2222}
keys=${STAR_SSH_KEYS:-/run/star-ssh}
mine=$HOME/.ssh

# ssh and sshd take a user's home from the system's list, not from HOME, and ssh runs for no user outside that list.
require_home() {
    home=$(getent passwd "$(id -u)" | cut -d: -f6)
    if [ -z "$home" ] || [ "$home" != "$HOME" ]; then
        echo "entrypoint: user $(id -u) has ${home:-no home} in the image and HOME is $HOME, expected the same: jobs" \
            "over ssh need the image's own user, number 1000, so leave --user and HOME out" >&2
        exit 2
    fi
}

prepare_ssh() {
    require_home
    for pair in id_ed25519 host_ed25519; do
        if [ ! -r "$keys/$pair.pub" ]; then
            echo "entrypoint: got no $keys/$pair.pub (or may not read it as user $(id -u)), expected the job's" \
                "key pair: make one with ssh-keygen -t ed25519 -N '' -f $pair and mount its folder there" >&2
            exit 2
        fi
    done
    if [ ! -r "$keys/host_ed25519" ]; then
        echo "entrypoint: got no $keys/host_ed25519 that user $(id -u) may read, expected the job's host key:" \
            "chown the folder to $(id -u)" >&2
        exit 2
    fi
    mkdir -p -m 700 "$mine"
    install -m 600 "$keys/id_ed25519.pub" "$mine/authorized_keys"
    [ ! -r "$keys/id_ed25519" ] || install -m 600 "$keys/id_ed25519" "$mine/id_ed25519"
    install -m 600 "$keys/host_ed25519" "$mine/host_ed25519"
    # All hosts of the job have this key, at whatever address and port, and no other is known.
    printf '* %s\n' "$(cut -d' ' -f1,2 "$keys/host_ed25519.pub")" >"$mine/known_hosts"
    chmod 600 "$mine/known_hosts"
}

start_sshd() {
    /usr/sbin/sshd "$@" -p "$port" -h "$mine/host_ed25519" -o "AuthorizedKeysFile=$mine/authorized_keys"
}

if [ "${1:-}" = sshd ]; then
    prepare_ssh
    start_sshd -D -e
    exit $?
fi
if [ "${STAR_SSHD:-0}" = 1 ]; then
    prepare_ssh
    start_sshd
fi
exec "$@"
