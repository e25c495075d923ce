# Which cluster to use and which images to run: sourced by hack/demo, hack/demo-down, hack/test, from the repository.
#
#   CLUSTER       local (default): hack/cluster's; current: the cluster of the current kubectl context
#   IMAGE_PREFIX  where images are named, and with CLUSTER=current pushed to
#   BUILD_FLAGS   with CLUSTER=current: further words for docker buildx build, such as a cache
# shellcheck shell=bash

CLUSTER=${CLUSTER:-local}
export CLUSTER IMAGE_PREFIX=${IMAGE_PREFIX:-localhost}
export SPECDECODE_OPERATOR_IMAGE=$IMAGE_PREFIX/specdecode-operator:dev
export SPECDECODE_WORKER_IMAGE=$IMAGE_PREFIX/specdecode-worker:dev

say() { echo "==> $*" >&2; }
fail() { echo "error: $*" >&2; exit 1; }

case $CLUSTER in
local) eval "$(hack/cluster/env)" ;;
current) ;;
*) fail "CLUSTER is '$CLUSTER'; it is 'local' or 'current'." ;;
esac

# The cluster answers, or is booted.
ensure_cluster() {
    if [[ $CLUSTER == local ]]; then
        hack/cluster/up
        return
    fi
    command -v kubectl >/dev/null || fail "CLUSTER=current needs kubectl on PATH."
    kubectl get --raw /readyz >/dev/null || fail "the cluster of the current kubectl context does not answer."
    say "Using the cluster of kubectl context $(kubectl config current-context)"
}

# Both images are where the cluster's nodes find them.
ensure_images() {
    if [[ $CLUSTER == local ]]; then
        hack/cluster/images
        return
    fi
    [[ $IMAGE_PREFIX != localhost ]] || fail "CLUSTER=current needs IMAGE_PREFIX, a registry that its nodes can pull from."
    command -v docker >/dev/null || fail "CLUSTER=current builds with docker buildx: put docker on PATH."
    mkdir -p out
    local component flags
    for component in operator worker; do
        say "Building and pushing $IMAGE_PREFIX/specdecode-$component:dev"
        flags=${BUILD_FLAGS:-}
        flags=${flags//COMPONENT/$component}
        # An attestation has the time of the build in it: each build would be another image.
        # shellcheck disable=SC2086  # words of their own
        docker buildx build $flags --provenance=false --push --tag "$IMAGE_PREFIX/specdecode-$component:dev" \
            --file "$component/Dockerfile" --metadata-file "out/image-$component.json" .
    done
}

# What a pod of this component would run now: it changes with every build that changes something.
image_identity() {
    if [[ $CLUSTER == local ]]; then
        hack/cluster/images --identity "$1"
    else
        sed -n 's/.*"containerimage.digest": "\(.*\)".*/\1/p' "out/image-$1.json"
    fi
}
