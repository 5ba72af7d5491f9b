//! `kernel!`: whatever names its author uses, a launch has the declared geometry and arguments.

use gpu_await::{Grid, kernel};

/// Every name that the expansion could take from its surroundings.
#[allow(dead_code, unused_macros, unused_imports, reason = "here to be taken by mistake")]
#[allow(non_camel_case_types, reason = "named like what could be taken")]
mod shadowed {
    use gpu_await::{Grid, LaunchConfig, kernel};

    pub(crate) struct Result;
    pub(crate) struct Option;
    pub(crate) struct Kernel;
    pub(crate) struct Declared;
    pub(crate) struct Clone;
    pub(crate) struct Debug;
    pub(crate) struct str;
    macro_rules! stringify {
        ($($any:tt)*) => {
            compile_error!("the author's macro of that name")
        };
    }
    pub(crate) use stringify;
    #[expect(non_snake_case, reason = "the variants of `Option` and `Result`")]
    pub(crate) fn Some() {}
    #[expect(non_snake_case, reason = "likewise")]
    pub(crate) fn Ok() {}

    /// A blanket method that would be taken for the trait's.
    pub(crate) trait Everything {
        fn launch_kernel(&self, _kernel: usize) {}
        fn kernel(&self) {}
        fn attributes(&self) {}
        fn require(&self) {}
    }
    impl<T: ?Sized> Everything for T {}

    /// Named like a generic parameter.
    type On = u32;

    kernel! {
        /// `x[i] += config + kernel + shapes + on`.
        pub unsafe fn sum(
            config: u32,
            kernel: u32,
            shapes: u32,
            on: On,
            x: &mut [u32],
            args: On = config + kernel,
            raw: u32 = { let shapes = shapes + on; args + shapes }
        ) where |launch| config + kernel == args,
                launch.block_dim()[0].wide() > on,
                { if on > 100 { return false; } raw == args + shapes + on };
        launch = { let config = x.len(); LaunchConfig::for_elements(config) };
        host = sum_twin;
    }

    #[expect(clippy::too_many_arguments, reason = "as many as the kernel has")]
    fn sum_twin(_: &Grid, _: u32, _: u32, _: u32, _: u32, x: &mut [u32], _: u32, raw: u32) {
        x.iter_mut().for_each(|x| *x += raw);
    }
}

#[test]
fn names_of_a_declaration_take_none_of_ours() {
    let device = gpu_await::Device::host();
    let stream = device.stream().unwrap();
    let sum = shadowed::sum::load_blocking(&device).unwrap();
    let mut x = stream.full(10, 1u32).queued().unwrap();
    sum.launch(&stream, 2, 3, 5, 7, &mut x).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [18; 10]);
    // One condition that returns early decides for itself alone, and one that fails is named.
    for (on, condition) in [(101, "return false"), (300, "launch.block_dim()[0].wide() > on")] {
        let error = sum.launch(&stream, 2, 3, 5, on, &mut x).queued().unwrap_err();
        let gpu_await::ErrorDetail::Precondition { requirement, values, .. } = error.detail()
        else {
            panic!("{error}");
        };
        assert!(requirement.contains(condition), "{error}");
        assert!(values.contains(&format!("on = {on}")), "{error}");
    }
    assert!(format!("{sum:?}").contains("sum") && sum.clone().attributes() == sum.attributes());
}

kernel! {
    /// A condition that always returns early.
    unsafe fn hasty(x: &mut [u32]) where { return true; }, x.len() == 4;
    launch = gpu_await::LaunchConfig::for_elements(x.len());
    host = nothing;
}

fn nothing(_: &Grid, _: &mut [u32]) {}

#[test]
fn a_condition_returns_for_itself_alone() {
    let device = gpu_await::Device::host();
    let stream = device.stream().unwrap();
    let hasty = hasty::load_blocking(&device).unwrap();
    let mut x = stream.full(5, 1u32).queued().unwrap();
    let error = hasty.launch(&stream, &mut x).queued().unwrap_err();
    assert!(error.to_string().contains("x.len() == 4"), "{error}");
}

/// Geometry, conditions and kernel see one value, whatever the expression reads.
#[test]
fn a_derived_value_is_computed_once() -> gpu_await::Result<()> {
    use std::sync::atomic::{AtomicU64, Ordering};

    static COMPUTED: AtomicU64 = AtomicU64::new(0);
    kernel! {
        unsafe fn once(
            y: &mut [u64],
            n: u64 = { COMPUTED.fetch_add(1, Ordering::SeqCst); y.len() },
            twice: u64 = 2 * n
        ) where n <= y.len();
        launch = gpu_await::LaunchConfig::for_elements(n);
        host = twin;
    }
    fn twin(_: &Grid, y: &mut [u64], n: u64, twice: u64) {
        y.fill(n + twice);
    }

    let device = gpu_await::Device::host();
    let once = once::load_blocking(&device)?;
    let stream = device.stream()?;
    let mut y = stream.zeros(4).queued()?;
    once.launch(&stream, &mut y).queued()?;
    assert_eq!(COMPUTED.load(Ordering::SeqCst), 1);
    assert_eq!(stream.download(&y).synchronize()?, [12; 4]);
    Ok(())
}

mod structs {
    use gpu_await::bytemuck::{Pod, Zeroable};
    use gpu_await::{Grid, LaunchConfig, kernel};

    /// A program needs no `bytemuck` of its own.
    #[derive(Clone, Copy, Debug, Pod, Zeroable)]
    #[bytemuck(crate = "gpu_await::bytemuck")]
    #[repr(C)]
    pub(crate) struct Line {
        pub(crate) slope: f32,
        pub(crate) at_zero: f32,
        pub(crate) len: u64,
    }

    kernel! {
        /// `y[i] = slope * i + at_zero`, and how much a step of eight is.
        pub unsafe fn line(y: Out<[f32]>, line: Line, eight: [f32; 1] = [8.0 * line.slope])
            where line.len.wide() <= y.len(), eight[0] >= line.slope;
        host = twin;
        launch = LaunchConfig::for_elements(line.len);
    }

    fn twin(_: &Grid, y: &mut [f32], line: Line, eight: [f32; 1]) {
        for (i, y) in y.iter_mut().enumerate() {
            *y = eight[0] / 8.0 * i as f32 + line.at_zero;
        }
    }
}

#[test]
fn a_struct_is_passed_by_value() -> gpu_await::Result<()> {
    let device = gpu_await::Device::host();
    let line = structs::line::load_blocking(&device)?;
    let stream = device.stream()?;
    let mut y = stream.empty::<f32>(4).queued()?;
    let values = structs::Line { slope: 2.0, at_zero: 1.0, len: 4 };
    line.launch(&stream, &mut y, values).queued()?;
    assert_eq!(stream.download(&y).synchronize()?, [1.0, 3.0, 5.0, 7.0]);
    // Conditions read its fields, and an error shows them.
    let values = structs::Line { len: 5, ..values };
    let error = line.launch(&stream, &mut y, values).queued().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("line.len.wide() <= y.len()") && text.contains("slope: 2.0"), "{text}");
    // SAFETY: with its own geometry, and the derived value that it has.
    let behind = unsafe { line.kernel() };
    let values = structs::Line { len: 4, ..values };
    let config = gpu_await::LaunchConfig::for_elements(4);
    stream.launch(behind, config, (&mut y, values, [16.0])).queued()?;
    Ok(())
}

mod generic {
    use std::ops::{Add, Mul};

    use gpu_await::{Grid, LaunchConfig, kernel};

    kernel! {
        /// `y[i] = a * x[i] + y[i]`, for each of its types.
        pub unsafe fn axpy<T>(a: T, x: &[T], y: &mut [T], n: u64 = y.len())
            where x.len() == y.len();
        entry = [f32: "axpy<float>", f64: "axpy<double>", i32: "axpy<int>"];
        cuda = "template <typename T> __global__ void axpy(T a, const T* x, T* y, unsigned long long n) {
            unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
            if (i < n) y[i] = a * x[i] + y[i];
        }";
        host = twin;
        launch = LaunchConfig::for_elements(y.len());
    }

    fn twin<T: Copy + Add<Output = T> + Mul<Output = T>>(
        _: &Grid,
        a: T,
        x: &[T],
        y: &mut [T],
        _: u64,
    ) {
        for (x, y) in x.iter().zip(y) {
            *y = a * *x + *y;
        }
    }
}

#[test]
fn one_declaration_for_several_types() -> gpu_await::Result<()> {
    use gpu_await::ErrorDetail;

    let device = gpu_await::testing::device();
    let stream = device.stream()?;
    let double = match generic::axpy::<f64>::load_blocking(&device) {
        Err(error) if matches!(error.detail(), ErrorDetail::NoCompiler { .. }) => {
            eprintln!("nothing to test without NVRTC: {error}");
            return Ok(());
        }
        loaded => loaded?,
    };
    let int = generic::axpy::<i32>::load_blocking(&device)?;
    let x = stream.upload(vec![1.0f64, 2.0]).queued()?;
    let mut y = stream.full(2, 0.5f64).queued()?;
    double.launch(&stream, 3.0, &x, &mut y).queued()?;
    assert_eq!(*stream.download(&y).synchronize()?, [3.5, 6.5]);
    let x = stream.upload(vec![1i32, 2]).queued()?;
    let mut y = stream.full(2, 10i32).queued()?;
    int.clone().launch(&stream, -1, &x, &mut y).queued()?;
    assert_eq!(*stream.download(&y).synchronize()?, [9, 8]);
    // Errors say which of them it is.
    let mut short = stream.full(1, 10i32).queued()?;
    let error = int.launch(&stream, -1, &x, &mut short).queued().unwrap_err();
    assert!(error.to_string().contains("axpy<i"), "{error}");
    assert!(format!("{int:?}").contains("axpy<i"), "{int:?}");
    Ok(())
}
