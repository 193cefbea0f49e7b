#!/bin/bash
# Entry point of both images: lets any user run the given command.
#
# Spark on Kubernetes starts a pod with one of two words instead of a command, and with variables:
#     driver ARGUMENTS...    spark-submit, with the pod's address
#     executor               an executor's Java
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

case "${1:-}" in
driver)
    shift
    address=${SPARK_DRIVER_BIND_ADDRESS:?is not set: Spark sets it in the pods of drivers}
    exec "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
        --conf "spark.driver.bindAddress=$address" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$address" "$@"
    ;;
executor)
    : "${SPARK_DRIVER_URL:?is not set: Spark sets it in the pods of executors}"
    # Each option of Java has a variable of its own: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, and so on.
    options=()
    name=SPARK_JAVA_OPT_0
    while [ -n "${!name+set}" ]; do
        options+=("${!name}")
        name=SPARK_JAVA_OPT_${#options[@]}
    done
    classes=${SPARK_CONF_DIR:-$SPARK_HOME/conf}${HADOOP_CONF_DIR:+:$HADOOP_CONF_DIR}
    classes+=${SPARK_CLASSPATH:+:$SPARK_CLASSPATH}:$SPARK_HOME/jars/*
    classes+=${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}
    classes+=${SPARK_DIST_CLASSPATH:+:$SPARK_DIST_CLASSPATH}
    exec "$JAVA_HOME/bin/java" "${options[@]}" \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classes" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
        --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
        --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*) exec "$@" ;;
esac
