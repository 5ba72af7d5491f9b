#!/usr/bin/env bash
# Tests on the host device under ThreadSanitizer or Miri; wants a nightly toolchain with `rust-src`
# and `miri`. Minutes, so not in `.ci/run`.
#
#     tests/sanitize.sh tsan basics lent drops
#     tests/sanitize.sh miri account
#     tests/sanitize.sh miri lent a_captured_download_waits
set -euo pipefail
cd "$(dirname "$0")/.."
export GPU_AWAIT_DEVICE=host
unset GPU_AWAIT_TEST_DEVICE
tool="$1"
shift
case "$tool" in
tsan)
    # A target folder of its own: the flags are part of every artefact. The standard library is built
    # as well, or its atomics would order nothing.
    export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/tsan" RUSTFLAGS="-Zsanitizer=thread"
    for name in "$@"; do
        cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu --test "$name"
    done
    ;;
miri)
    # The clock is the host's; addresses cross the backend as integers; pollers outlive `main`, since
    # Miri runs no exit handlers.
    export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" PROPTEST_CASES="${PROPTEST_CASES:-2}"
    export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks"
    name="$1"
    shift
    cargo +nightly miri test --test "$name" -- "$@"
    ;;
*) exit 2 ;;
esac
