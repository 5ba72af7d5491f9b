//! CUDA C++ compiled at run time, on the device that the tests run on.
//!
//! On a GPU it is compiled and run where there is an NVRTC (`GPU_AWAIT_NVRTC` names one that the loader
//! does not find), and its absence is checked where there is none; which of the two is printed. What
//! needs the compiler and no GPU is in `driver_calls/compile.rs`.

use gpu_await::{
    CudaSource, Device, DeviceKind, Element, ErrorDetail, ErrorKind, InOut, Kernel, LaunchConfig,
    Module, testing,
};

const SQUARE: &str = r#"
extern "C" __global__ void square(float* x, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= x[i];
}
template <typename T> __global__ void triple(T* x, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= T(3);
}"#;

fn source() -> CudaSource {
    CudaSource::new(SQUARE).named("square.cu").instance("triple<int>").instance("triple<double>")
}

/// Whether the device compiles; where it does not, that it says so.
async fn compiles(device: &Device) -> bool {
    match Module::compile(device, source()).await {
        Ok(_) => {
            println!("run-time compilation: on {device}");
            return true;
        }
        Err(error) => {
            println!("run-time compilation: not here: {error}");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            match (device.kind(), error.detail()) {
                (DeviceKind::Cuda, ErrorDetail::NoCompiler { looked_for, .. }) => {
                    assert!(!looked_for.is_empty());
                }
                (DeviceKind::Host, ErrorDetail::Unsupported { what, .. }) => {
                    assert!(what.contains("Kernel::host"), "{error}");
                }
                _ => panic!("{error}"),
            }
        }
    }
    false
}

fn kernel<T: Element>(module: &Module, name: &str) -> Kernel<(InOut<T>, u32)> {
    // SAFETY: these are the types of the kernels above, which stay below n.
    let kernel = unsafe { module.kernel::<(InOut<T>, u32)>(name) }.unwrap();
    kernel.require("n == x.len()", |_, (x, n)| *n as usize == x.len())
}

async fn run<T: Element>(device: &Device, kernel: &Kernel<(InOut<T>, u32)>, x: Vec<T>) -> Vec<T> {
    let stream = device.stream().unwrap();
    let n = x.len();
    let mut x = stream.upload(x).queued().unwrap();
    let config = LaunchConfig::for_elements(n);
    stream.launch(kernel, config, (&mut x, n as u32)).queued().unwrap();
    stream.download_vec(&x).await.unwrap()
}

#[tokio::test]
async fn ptx_and_machine_code_of_a_source_compute_what_it_says() {
    let device = testing::device();
    if !compiles(&device).await {
        return;
    }
    for source in [source(), source().cubin(), source().max_registers(32).line_info()] {
        let module = Module::compile(&device, source).await.unwrap();
        let squared = run(&device, &kernel(&module, "square"), vec![1.5f32; 1000]).await;
        assert_eq!(squared, [2.25; 1000]);
        let tripled = run(&device, &kernel(&module, "triple<int>"), vec![-7i32, 0, 9]).await;
        assert_eq!(tripled, [-21, 0, 27]);
        let tripled = run(&device, &kernel(&module, "triple<double>"), vec![0.5f64]).await;
        assert_eq!(tripled, [1.5]);
    }
}

#[tokio::test]
async fn bounds_in_the_source_are_in_the_attributes_and_hold_for_launches() {
    let device = testing::device();
    if !compiles(&device).await {
        return;
    }
    let text = SQUARE.replace("void square", "void __launch_bounds__(128) square");
    let module = Module::compile(&device, CudaSource::new(text)).await.unwrap();
    let square = kernel::<f32>(&module, "square");
    assert_eq!(square.attributes().max_threads_per_block, 128);
    let stream = device.stream().unwrap();
    let mut x = stream.zeros::<f32>(256).queued().unwrap();
    let launched = stream.launch(&square, LaunchConfig::new(1, 129), (&mut x, 256));
    let error = launched.queued().unwrap_err();
    assert!(
        matches!(error.detail(), ErrorDetail::LaunchLimit { asked: 129, limit: 128, .. }),
        "{error}"
    );
    let (_, block) = square.occupancy().best_block(|_| 0, None).unwrap();
    assert_eq!(block, 128);
}
