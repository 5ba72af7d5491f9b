//! CUDA C++ compiled at run time, where there is an NVRTC; and what is said where there is none.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, fs};

use gpu_await::{
    CudaSource, Device, ErrorDetail, ErrorKind, ImageProblem, InOut, LaunchConfig, Module,
};

use super::{Completion, OURS, StandIn, device_with, runtime, soon};

const VARIABLE: &str = "GPU_AWAIT_NVRTC";
const CACHE: &str = "GPU_AWAIT_CACHE_DIR";

/// The library's folder: the one of `kernels/build.py`, or what the environment names.
fn nvrtc() -> Option<PathBuf> {
    let root = env::var_os("CARGO_MANIFEST_DIR");
    let root = PathBuf::from(root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()));
    let built = root.join("target/nvrtc-12.0/nvidia/cuda_nvrtc/lib");
    let named = env::var_os(VARIABLE).map(PathBuf::from);
    named.into_iter().chain([built]).find(|path| path.exists())
}

/// Runs `body` under the stand-in with the compiler, or says that there is none and checks that the
/// library says so as well.
fn with_the_compiler<F: AsyncFnOnce(&StandIn)>(body: F) {
    with_the_compiler_and("", |run| run(), body);
}

/// The same with a folder for the disk cache; `runs` has the process run, as often as it likes.
fn with_the_compiler_and<F: AsyncFnOnce(&StandIn)>(
    cache: &str,
    runs: impl FnOnce(&dyn Fn()),
    body: F,
) {
    let name = std::any::type_name::<F>();
    let name = name.trim_start_matches("driver_calls::").trim_end_matches("::{{closure}}");
    if !stand_in_cuda::is_child() {
        let library = nvrtc();
        match &library {
            Some(path) => println!("run-time compilation: with {}", path.display()),
            None => println!("run-time compilation: no NVRTC, only its absence is tested"),
        }
        let named = library.unwrap_or_else(|| PathBuf::from("/no/such/folder/libnvrtc.so"));
        let variables = [(VARIABLE, named.to_str().unwrap()), (CACHE, cache)];
        return runs(&|| stand_in_cuda::assert_child(name, &variables));
    }
    let driver = StandIn::open();
    runtime().block_on(async {
        if nvrtc().is_some() {
            body(&driver).await;
        } else {
            is_missing().await;
        }
    });
    assert_eq!(driver.misuse(), [""; 0]);
}

async fn is_missing() {
    let device = device_with(Completion::Adaptive);
    let error = soon(Module::compile(&device, CudaSource::new(SQUARE))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    match error.detail() {
        ErrorDetail::NoCompiler { looked_for, reason } => {
            assert_eq!(*looked_for, [env::var(VARIABLE).unwrap()]);
            assert!(reason.contains("libnvrtc.so"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let told = error.to_string();
    for what in [VARIABLE, "nvidia-cuda-nvrtc-cu12", "libnvrtc12", "PTX"] {
        assert!(told.contains(what), "{what}: {told}");
    }
}

const SQUARE: &str = r#"extern "C" __global__ void square(float* x, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= x[i];
}"#;

#[test]
fn without_a_compiler_the_error_says_what_was_looked_for() {
    const NAME: &str = "compile::without_a_compiler_the_error_says_what_was_looked_for";
    if !stand_in_cuda::is_child() {
        return stand_in_cuda::assert_child(NAME, &[(VARIABLE, "/no/such/folder/libnvrtc.so.12")]);
    }
    runtime().block_on(is_missing());
}

#[test]
fn a_source_is_compiled_for_the_device_and_its_kernel_launched() {
    with_the_compiler(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let module = soon(Module::compile(&device, CudaSource::new(SQUARE))).await.unwrap();
        // SAFETY: the kernel's parameters; the stand-in computes nothing.
        let square = unsafe { module.kernel::<(InOut<f32>, u32)>("square") }.unwrap();
        let mut x = stream.full(10, 3.0f32).queued().unwrap();
        driver.clear();
        soon(stream.launch(&square, LaunchConfig::for_elements(10), (&mut x, 10))).await.unwrap();
        let calls = driver.calls();
        let launch = calls.iter().find(|line| line.starts_with("cuLaunchKernel square")).unwrap();
        assert!(launch.contains(",10)"), "two parameters: {launch}");
        // SAFETY: there is no such kernel.
        let error = unsafe { module.kernel::<()>("cube") }.unwrap_err();
        assert!(error.to_string().contains("`source.cu` has no kernel `cube`"), "{error}");
    });
}

#[test]
fn machine_code_reaches_the_driver_as_such() {
    with_the_compiler(async |driver| {
        let device = device_with(Completion::Adaptive);
        let source = CudaSource::new(SQUARE).named("square.cu").cubin();
        // All that the compiler writes is checked before, and passes.
        for source in [
            source.clone(),
            source.clone().line_info(),
            source.clone().option("--device-debug"),
            source.clone().option("--relocatable-device-code=true"),
            source.clone().architecture("sm_50"),
        ] {
            driver.clear();
            let error = soon(Module::compile(&device, source)).await.unwrap_err();
            assert!(driver.names().contains(&"cuLibraryLoadData".to_owned()), "{error}");
            // The stand-in loads nothing but PTX.
            match error.detail() {
                ErrorDetail::BadImage { image, problem: ImageProblem::Driver(code), .. } => {
                    assert_eq!((&**image, code.code), ("square.cu", 200));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn an_instance_of_a_template_is_found_as_it_is_written() {
    with_the_compiler(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let text = r#"
            #include "cube.h"
            namespace mine { template <typename T, int N> __global__ void power(T* x) {
                *x = cube(*x) * N * FACTOR;
            } }"#;
        let source = CudaSource::new(text)
            .header("cube.h", "template <typename T> __device__ T cube(T x) { return x * x * x; }")
            .define("FACTOR", "3")
            .option("--std=c++17")
            .instance("mine::power<float, 2>")
            .instance("mine::power<double, 5>");
        let module = soon(Module::compile(&device, source)).await.unwrap();
        for name in ["mine::power<float, 2>", "mine::power<double, 5>"] {
            // SAFETY: never launched.
            let kernel = unsafe { module.kernel::<(InOut<f32>,)>(name) }.unwrap();
            assert_eq!(kernel.name(), name);
        }
        // SAFETY: there is no such kernel.
        assert!(unsafe { module.kernel::<(InOut<f32>,)>("mine::power<int, 2>") }.is_err());
    });
}

mod declared {
    use gpu_await::{CudaSource, LaunchConfig, kernel};

    kernel! {
        pub(super) unsafe fn fill<T>(a: T, x: Out<[T]>, n: u32 = x.len());
        launch = LaunchConfig::for_elements(x.len());
        entry = [f32: "fill<float>", u8: "fill<unsigned char>", f64: "fill<int>"];
        cuda = CudaSource::new("template <typename T> __global__ void fill(T a, T* x, unsigned n) {
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) x[i] = ADD + a;
        }").define("ADD", "1");
    }

    kernel! {
        pub(super) unsafe fn wrong(x: &mut [f32]);
        launch = LaunchConfig::for_elements(x.len());
        cuda = "__global__ void wrong() { undeclared(); }";
    }
}

#[test]
fn a_declaration_in_cuda_cpp_is_compiled_when_it_is_loaded() {
    with_the_compiler(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let fill = soon(declared::fill::<f32>::load(&device)).await.unwrap();
        let mut x = stream.empty::<f32>(10).queued().unwrap();
        driver.clear();
        soon(fill.launch(&stream, 1.5, &mut x)).await.unwrap();
        let calls = driver.calls();
        let launch = calls.iter().find(|line| line.starts_with("cuLaunchKernel ")).unwrap();
        assert!(launch.contains(",10)"), "{launch}");
        soon(declared::fill::<u8>::load(&device)).await.unwrap();
        // A type that is not the instance's.
        let error = soon(declared::fill::<f64>::load(&device)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongParameters { .. }), "{error}");
        // The log has the declaration's name.
        let error = declared::wrong::load_blocking(&device).unwrap_err();
        assert!(error.to_string().contains("wrong(1)"), "{error}");
        // There is no twin.
        let error = declared::wrong::load_blocking(&Device::host()).unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::NoImplementation { .. }), "{error}");
    });
}

#[test]
fn a_source_that_does_not_compile_comes_with_file_line_and_log() {
    with_the_compiler(async |driver| {
        let device = device_with(Completion::Adaptive);
        let compile = |source: CudaSource| soon(Module::compile(&device, source));
        let wrong = CudaSource::new("\n\n__global__ void f() { undeclared(); }").named("wrong.cu");
        let error = compile(wrong).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        match error.detail() {
            ErrorDetail::Compile { file, reason, log } => {
                assert_eq!((&**file, &**reason), ("wrong.cu", "NVRTC_ERROR_COMPILATION"));
                assert!(log.contains("wrong.cu(3)") && log.contains("undeclared"), "{log}");
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("wrong.cu(3)"), "{error}");
        // Options, instances and texts that are none.
        let square = CudaSource::new(SQUARE);
        for (source, word) in [
            (square.clone().option("--no-such-option"), "no-such-option"),
            (square.clone().architecture("compute_1"), "gpu-architecture"),
            (square.clone().instance("no_such_kernel<int>"), "no_such_kernel"),
            (square.header("a.h", "\0"), "NUL"),
        ] {
            let error = compile(source).await.unwrap_err();
            assert!(matches!(error.detail(), ErrorDetail::Compile { .. }), "{error}");
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        assert_eq!(driver.live("module"), OURS, "nothing was loaded");
        compile(CudaSource::new(SQUARE)).await.unwrap();
    });
}

/// A folder of a test's own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = env::temp_dir().join(format!("gpu-await-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The files of a cache, each with its number in the file system, which another of the same name has not.
fn entries(cache: &Path) -> Vec<(PathBuf, u64)> {
    let files = fs::read_dir(cache).unwrap().map(Result::unwrap);
    files.map(|file| (file.path(), file.metadata().unwrap().ino())).collect()
}

/// The folder of the cache, in the child.
fn cache() -> PathBuf {
    env::var_os(CACHE).unwrap().into()
}

async fn has(device: &Device, source: &CudaSource, name: &str) -> bool {
    let module = soon(Module::compile(device, source.clone())).await.unwrap();
    // SAFETY: never launched.
    unsafe { module.kernel::<(InOut<i32>,)>(name) }.is_ok()
}

#[test]
fn what_decides_itself_is_compiled_once() {
    let folder = Folder::new("once");
    with_the_compiler_and(
        folder.0.to_str().unwrap(),
        |run| run(),
        async |_driver| {
            let device = device_with(Completion::Adaptive);
            let text = "#include \"name.h\"\nextern \"C\" __global__ void NAME(int* x) {}";
            let source = CudaSource::new(text).header("name.h", "#define NAME given");
            assert!(has(&device, &source, "given").await);
            let first = entries(&cache());
            assert_eq!(first.len(), 1);
            // The device has it in memory.
            fs::remove_file(&first[0].0).unwrap();
            assert!(has(&device, &source, "given").await);
            assert_eq!(entries(&cache()), []);
            // Another device and other options do not.
            assert!(has(&device_with(Completion::Adaptive), &source, "given").await);
            assert_eq!(entries(&cache())[0].0, first[0].0);
            assert!(has(&device, &source.clone().fast_math(), "given").await);
            assert_eq!(entries(&cache()).len(), 2);
        },
    );
}

#[test]
fn what_files_decide_is_compiled_each_time() {
    let folder = Folder::new("each-time");
    with_the_compiler_and(
        folder.0.to_str().unwrap(),
        |run| run(),
        async |_driver| {
            let device = device_with(Completion::Adaptive);
            let files = Folder::new("files");
            let header = files.0.join("name.h");
            let body = "extern \"C\" __global__ void NAME(int* x) {}";
            let by_path = CudaSource::new(format!("#include \"{}\"\n{body}", header.display()));
            let by_folder =
                CudaSource::new(format!("#include <name.h>\n{body}")).include_dir(&files.0);
            for name in ["first", "second"] {
                fs::write(&header, format!("#define NAME {name}\n")).unwrap();
                assert!(has(&device, &by_path, name).await);
                assert!(has(&device, &by_folder, name).await);
            }
            assert_eq!(entries(&cache()), []);
        },
    );
}

#[test]
fn another_process_takes_it_from_the_disk() {
    let folder = Folder::new("processes");
    let runs = |run: &dyn Fn()| {
        run();
        let first = entries(&folder.0);
        // Without a compiler there is none.
        let [(path, number)] = &first[..] else { return assert_eq!(nvrtc(), None) };
        let old = SystemTime::now() - Duration::from_secs(1000);
        fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
        run();
        assert_eq!(entries(&folder.0), first, "it was not written again");
        assert!(fs::metadata(path).unwrap().modified().unwrap() > old, "it was used");
        // One that was changed is compiled again.
        let mut changed = fs::read(path).unwrap();
        let middle = changed.len() / 2;
        changed[middle] ^= 1;
        fs::write(path, changed).unwrap();
        run();
        let again = entries(&folder.0);
        assert_ne!(again[0].1, *number);
        run();
        assert_eq!(entries(&folder.0), again);
        // And nothing is wrong without a folder.
        fs::remove_file(path).unwrap();
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
        run();
        assert_eq!(entries(&folder.0), []);
    };
    with_the_compiler_and(folder.0.to_str().unwrap(), runs, async |_driver| {
        let text = "template <typename T> __global__ void scale(T* x) { int unused; *x *= T(2); }";
        let source = CudaSource::new(text).instance("scale<int>");
        let device = device_with(Completion::Adaptive);
        let module = soon(Module::compile(&device, source)).await.unwrap();
        // SAFETY: never launched.
        assert!(unsafe { module.kernel::<(InOut<i32>,)>("scale<int>") }.is_ok());
    });
}
