#!/usr/bin/env bash
# Build an image with buildah, which needs no daemon:
#
#   scripts/build_image.sh [--debootstrap] cpu|cuda [TAG] [-- OPTION...]
#
# --debootstrap   do not pull the base image: make a plain Debian bookworm from Debian's
#                 packages (for hosts without a registry; needs root and debootstrap)
# TAG             name of the image (star-hvd:cpu or star-hvd:cuda)
# OPTION...       passed to `buildah bud`: --build-arg, -v and so on. Examples:
#     -- --build-arg TORCH_SPEC=torch==2.12.0
#     -- -v /srv/wheels:/wheels:ro --build-arg PIP_FIND_LINKS=/wheels   local wheels
#
# Environment: BUILDAH_ISOLATION=chroot and STORAGE_DRIVER=vfs work inside containers;
# DEBIAN_MIRROR is debootstrap's (http://deb.debian.org/debian).
# Tools: apt-get install buildah debootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."

base_name=localhost/star-hvd-base:bookworm
debootstrap=no
if [ "${1:-}" = --debootstrap ]; then
    debootstrap=yes
    shift
fi
target=${1:-}
case $target in
cpu | cuda) shift ;;
*)
    echo "build_image.sh: got target '$target', expected cpu or cuda (see the head of this script)" >&2
    exit 2
    ;;
esac
tag=star-hvd:$target
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    tag=$1
    shift
fi
[ "${1:-}" != -- ] || shift

need() {
    command -v "$1" >/dev/null && return
    echo "build_image.sh: $1 was not found: apt-get install $1" >&2
    exit 2
}

make_base() {
    need debootstrap
    local root container
    root=$(mktemp -d)
    # shellcheck disable=SC2064  # expand now: root is local
    trap "rm -rf '$root'" EXIT
    echo "[image] making a Debian base with debootstrap (minutes)"
    debootstrap --variant=minbase bookworm "$root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root.log" ||
        { tail -n 20 "$root.log" >&2; exit 1; }
    rm -f "$root.log"
    # The container runtime creates its own /dev, and some hosts cannot copy device nodes.
    rm -rf "$root"/dev/* "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$root" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd bash "$container"
    buildah commit --quiet --rm "$container" "$base_name" >/dev/null
}

need buildah
arguments=()
if [ "$debootstrap" = yes ]; then
    buildah inspect --type image "$base_name" >/dev/null 2>&1 || make_base
    arguments+=(--build-arg "BASE_${target^^}=$base_name")
fi
echo "[image] building $tag"
buildah bud --layers --target "$target" --tag "$tag" "${arguments[@]}" "$@" .
