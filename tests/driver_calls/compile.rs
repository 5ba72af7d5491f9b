//! CUDA C++ compiled at run time, where there is an NVRTC; and what is said where there is none.

use std::path::PathBuf;
use std::{env, fs};

use gpu_await::{
    CudaSource, Device, ErrorDetail, ErrorKind, ImageProblem, InOut, LaunchConfig, Module,
};

use super::{Completion, StandIn, device_with, runtime, soon};

const VARIABLE: &str = "GPU_AWAIT_NVRTC";

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
    let name = std::any::type_name::<F>();
    let name = name.trim_start_matches("driver_calls::").trim_end_matches("::{{closure}}");
    if !stand_in_cuda::is_child() {
        let library = nvrtc();
        match &library {
            Some(path) => println!("run-time compilation: with {}", path.display()),
            None => println!("run-time compilation: no NVRTC, only its absence is tested"),
        }
        let named = library.unwrap_or_else(|| PathBuf::from("/no/such/folder/libnvrtc.so"));
        return stand_in_cuda::assert_child(name, &[(VARIABLE, named.to_str().unwrap())]);
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
    assert!(error.to_string().contains(VARIABLE), "{error}");
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
            assert!(driver.names().contains(&"cuModuleLoadDataEx".to_owned()), "{error}");
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
        pub(super) unsafe fn fill<T>(a: T, x: Out<[T]>, n: u32 = x.len() as u32);
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
        assert_eq!(driver.live("module"), 0, "nothing was loaded");
        compile(CudaSource::new(SQUARE)).await.unwrap();
    });
}

#[test]
fn a_source_that_was_compiled_is_kept_unless_a_folder_may_have_changed() {
    with_the_compiler(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let folder = env::temp_dir().join(format!("gpu-await-compile-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let header = folder.join("name.h");
        let by_path = format!("#include \"{}\"\n", header.display());
        let body = "extern \"C\" __global__ void NAME(int* x) {}";
        let kept = CudaSource::new(by_path + body);
        let afresh = CudaSource::new(format!("#include <name.h>\n{body}")).include_dir(&folder);
        let has = async |source: &CudaSource, name: &str| {
            let module = soon(Module::compile(&device, source.clone())).await.unwrap();
            // SAFETY: never launched.
            unsafe { module.kernel::<(InOut<i32>,)>(name) }.is_ok()
        };
        fs::write(&header, "#define NAME first\n").unwrap();
        assert!(has(&kept, "first").await && has(&afresh, "first").await);
        fs::write(&header, "#define NAME second\n").unwrap();
        assert!(has(&kept, "first").await, "the first result was kept");
        assert!(has(&afresh, "second").await, "it was compiled again");
        // Other options are another source, another device keeps its own.
        assert!(has(&kept.clone().fast_math(), "second").await);
        let other = device_with(Completion::Adaptive);
        let module = soon(Module::compile(&other, kept)).await.unwrap();
        // SAFETY: never launched.
        assert!(unsafe { module.kernel::<(InOut<i32>,)>("second") }.is_ok());
        fs::remove_dir_all(&folder).unwrap();
    });
}
