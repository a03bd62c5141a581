#!/bin/sh
# Fail unless this image's Horovod was built with everything named in the arguments:
#   check_build.sh PyTorch Gloo NCCL
set -eu
built=$(horovodrun --check-build)
echo "$built"
for part in "$@"; do
    if ! echo "$built" | grep -q "\[X\] $part"; then
        echo "check_build.sh: Horovod was built without $part; see the table above and the build log" >&2
        exit 1
    fi
done
