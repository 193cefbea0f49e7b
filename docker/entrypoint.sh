#!/bin/bash
# Entry point of both images: lets any user run the given command.
set -eu

# Python, Java and the ranks keep sockets and temporary files in this folder.
if ! folder=$(mktemp --directory 2>&1); then
    echo "entrypoint.sh: no file can be created in ${TMPDIR:-/tmp}: $folder" >&2
    echo "If the root file system is read-only, add a writable folder: docker run --tmpfs /tmp," \
        "or an emptyDir volume with mountPath /tmp in a pod." >&2
    exit 1
fi

# OpenShift and `docker run --user` choose users without a line in /etc/passwd. Spark does not start
# for them, because Hadoop asks for the user's name. That file itself may be read-only.
if ! getent passwd "$(id --user)" >/dev/null; then
    cp /etc/passwd "$folder/passwd"
    echo "user$(id --user):x:$(id --user):$(id --group)::$folder:/bin/bash" >>"$folder/passwd"
    export NSS_WRAPPER_PASSWD="$folder/passwd" NSS_WRAPPER_GROUP=/etc/group
    export LD_PRELOAD="libnss_wrapper.so${LD_PRELOAD:+ $LD_PRELOAD}"
fi

# Caches are written below the home folder. Docker sets it to / for a user that it does not know.
if [ ! -w "${HOME:-/}" ] || [ "${HOME:-/}" = / ]; then
    export HOME="$folder"
fi

exec "$@"
