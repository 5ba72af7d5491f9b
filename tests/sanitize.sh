#!/usr/bin/env bash
# Tests on the host device under ThreadSanitizer or Miri, which want a nightly toolchain with `rust-src`
# and `miri`; or on a GPU under NVIDIA's compute-sanitizer. Minutes, so not in `.ci/run`.
#
#     tests/sanitize.sh tsan programs::basics memory::lent lifetimes::drops
#     tests/sanitize.sh miri models::account    (of gpu-await-protocol)
#     tests/sanitize.sh miri memory::lent a_captured_download_waits
#     tests/sanitize.sh miri-all
#     tests/sanitize.sh racecheck algorithms::{algorithms,aggregates,operators,segmented_sort,top_k}
#     tests/sanitize.sh memcheck algorithms::algorithms
#
# What to run is a binary of tests, or a file of one: `memory`, `memory::lent`.
#
# racecheck and memcheck run each test in a process of its own, say its seconds, and end with 1 if the tool
# found anything or a test failed. Under racecheck kernels are so slow that tests which go through lengths
# leave out those above GPU_AWAIT_TEST_LARGEST elements, 65537 unless that is set. Up to there are the
# boundaries of warps, blocks and tiles, and several tiles that look back at one another; what is left out,
# 2^20 - 1 and 2^20 + 1, is more tiles, and the radix select of `of_many_*` in top_k.rs, which begins at
# 2^19: with GPU_AWAIT_TEST_LARGEST=600000 and a process for each of these tests the tool takes up to 128 GiB of
# the host's memory. Blocks that take several tiles each are those of `more_than_a_grid`, which has a length of
# its own and runs here as well; of histograms, segments and the operators of operators.rs racecheck sees
# none that do.
set -euo pipefail
cd "$(dirname "$0")/.."
export GPU_AWAIT_DEVICE=host
device="${GPU_AWAIT_TEST_DEVICE:-cuda:0}"
unset GPU_AWAIT_TEST_DEVICE
tool="$1"
shift

# What the names of the tests of a file begin with; nothing for a whole binary.
file_of() {
    case "$1" in *::*) printf '%s::' "${1#*::}" ;; esac
}

# A binary or a file of tests, or `lib` for those in `src`; and parts of the names of those to run.
miri() {
    local name="$1" target=(--package gpu-await --lib) file
    file="$(file_of "$name")"
    shift
    [ "$name" = lib ] || target=(--test "${name%%::*}")
    case "$name" in models*) target=(--package gpu-await-protocol "${target[@]}") ;; esac
    [ $# -gt 0 ] || set -- ''
    # A clock of Miri's own, so that no time limit passes because the machine is busy; addresses cross the
    # backend as integers; pollers outlive `main`, since Miri runs no exit handlers.
    local flags="-Zmiri-permissive-provenance -Zmiri-ignore-leaks"
    flags+=" -Zmiri-env-forward=GPU_AWAIT_DEVICE -Zmiri-env-forward=PROPTEST_CASES"
    CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" MIRIFLAGS="$flags" \
        cargo +nightly miri test "${target[@]}" -- "${@/#/$file}"
}

case "$tool" in
tsan)
    # A target folder of its own: the flags are part of every artefact. The standard library is built
    # as well, or its atomics would order nothing.
    export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/tsan" RUSTFLAGS="-Zsanitizer=thread"
    for name in "$@"; do
        cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu --test "${name%%::*}" "$(file_of "$name")"
    done
    ;;
racecheck | memcheck)
    export GPU_AWAIT_TEST_DEVICE="$device"
    unset GPU_AWAIT_DEVICE
    options=(--tool "$tool" --error-exitcode 99)
    if [ "$tool" = racecheck ]; then
        export GPU_AWAIT_TEST_LARGEST="${GPU_AWAIT_TEST_LARGEST:-65537}"
    else
        # Tests have the driver refuse calls on purpose.
        options+=(--report-api-errors no)
    fi
    failed=0
    for name in "$@"; do
        binary="${name%%::*}"
        program="$(cargo test --release --test "$binary" --no-run --message-format json |
            sed -n 's/.*"name":"'"$binary"'".*"executable":"\([^"]*\)".*/\1/p')"
        for test in $("$program" "$(file_of "$name")" --list --format terse | sed -n 's/: test$//p'); do
            start=$SECONDS end=0
            compute-sanitizer "${options[@]}" "$program" --exact "$test" || end=$?
            printf '=== %d s  %s %s: exit code %d\n' $((SECONDS - start)) "$binary" "$test" "$end"
            [ "$end" -eq 0 ] || failed=1
        done
    done
    exit "$failed"
    ;;
miri) miri "$@" ;;
miri-all)
    # All tests of pure modules, with what `tests/under_test/cases.rs` leaves of them, and tests that go
    # through the files with `unsafe`, but for the driver's and the callers' own: each in a process of its
    # own, or time limits pass beside what others left running. 20 minutes on one core.
    while read -r name tests; do
        start=$SECONDS
        # shellcheck disable=SC2086
        miri "$name" $tests </dev/null
        printf '=== %d s  %s %s\n' $((SECONDS - start)) "$name" "$tests"
    done <<'LIST'
models::hazard
models::account
models::buddy
models::cadence
models::admission
models::block_cache
lib memory::pageable
programs::basics an_op_in_front_of_a_gate
kernels::declared_kernels
streams::events dropping_a_pending_event
streams::host_functions an_op_polled_inside
streams::host_functions what_a_host_function_leaves
memory::lent a_captured_download
memory::lent a_captured_vec_download
memory::memory a_view_is_taken
memory::memory figures_make_no_reference
memory::memory rows_go_where
memory::memory untracked_uses
errors::subscribers a_loss_may_be_told
errors::subscribers what_the_driver_does_not_take_back
memory::unwritten no_kernel_reads_it
streams::wholes waiting_for_one_stream
LIST
    ;;
*) exit 2 ;;
esac
