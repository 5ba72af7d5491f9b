//! NVIDIA's libraries that are not there, or are not what they should be.

use gpu_await::{Completion, Error, ErrorDetail, ErrorKind};
use gpu_await_libs::{Blas, Fft};

use super::{async_under_the_stand_in, device_with, soon};

const VARIABLES: [&str; 2] = ["GPU_AWAIT_CUBLASLT", "GPU_AWAIT_CUFFT"];

/// Loads both in a child process in which that file is the library, and looks at the errors.
fn with_the_file(test: &str, file: &str, reason: [&str; 2]) {
    if !stand_in_cuda::is_child() {
        return stand_in_cuda::assert_child(test, &VARIABLES.map(|variable| (variable, file)));
    }
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let blas = soon(Blas::load(&device)).await.map(drop).unwrap_err();
        let fft = soon(Fft::load(&device)).await.map(drop).unwrap_err();
        for (n, error) in [blas, fft].into_iter().enumerate() {
            check(&error, ["cuBLASLt", "cuFFT"][n], VARIABLES[n], file, reason[n]);
        }
        assert!(Blas::load_blocking(&device).is_err() && Fft::load_blocking(&device).is_err());
        // The device goes on.
        soon(device.zeros::<u8>(5)).await.unwrap();
    });
}

fn check(error: &Error, name: &str, named: &str, file: &str, why: &str) {
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    match error.detail() {
        ErrorDetail::NoLibrary { library, variable, looked_for, reason, .. } => {
            assert_eq!((*library, *variable), (name, named));
            assert_eq!(*looked_for, [file]);
            assert!(reason.contains(why), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let text = error.to_string();
    for part in [name, file, named, "install"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_library_that_is_missing() {
    let test = "libraries::a_library_that_is_missing";
    with_the_file(test, "/no/such/library.so", ["No such file"; 2]);
}

#[test]
fn a_file_that_is_no_library() {
    let test = "libraries::a_file_that_is_no_library";
    with_the_file(test, concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), ["invalid ELF"; 2]);
}

/// As one that is too old.
#[test]
fn a_library_without_an_entry_point() {
    let test = "libraries::a_library_without_an_entry_point";
    with_the_file(test, "libc.so.6", ["has no `cublasLt", "has no `cufft"]);
}
