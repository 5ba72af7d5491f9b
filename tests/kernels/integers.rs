//! Integers in a kernel's conditions, geometry and derived arguments: exact, whatever the caller passes, and never a panic.
#![forbid(unsafe_code)]

use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, ErrorKind, Kernel, LaunchConfig, LaunchLimit, Op, Out,
    Stream,
};

use self::declared::{
    Extent, config, derived, divided, forward, geometry, rows_of, sixteen, structs,
};

/// Declarations, whose twins are never called with what does not hold.
mod declared {
    use gpu_await::bytemuck::{Pod, Zeroable};
    use gpu_await::{Grid, LaunchConfig, kernel};

    /// Another name.
    pub(crate) type Index = u32;

    kernel! {
        /// One block a row.
        pub unsafe fn rows_of(x: Out<[u8]>, rows: u32, columns: u32, planes: Index)
            where x.len() == rows * columns * planes;
        launch = LaunchConfig::new(rows, 256);
        host = |_, x, _, _, _| x.fill(1);
    }

    kernel! {
        /// All kinds of derived arguments.
        pub unsafe fn derived(
            x: &mut [u8],
            at: i64,
            len: u8 = x.len(),
            above: u32 = x.len() - at,
            half: i8 = len / 2,
            part: f32 = 1.0 / x.len() as f32,
            constant: u16 = SIX,
            cast: u64 = x.len() as u64,
            blocks: u32 = x.len().div_ceil(3)
        );
        launch = LaunchConfig::for_elements(above);
        host = |_, x, _, len, above, half, part, constant, cast, blocks| {
            assert_eq!((len, half, constant, cast, blocks), (4, 2, 6, 4, 2));
            assert_eq!(part, 0.25);
            x.fill(above as u8);
        };
    }
    const SIX: usize = 6;

    kernel! {
        /// Derived arguments in front of what they are derived from, as kernels of C++ often have them.
        pub unsafe fn forward(
            tokens: u32 = x.len() / hidden,
            rows: u16 = y.rows() * tokens,
            hidden: u32,
            x: &mut [u8],
            y: &[[u8]],
        )
            where x.len() == tokens * hidden;
        launch = LaunchConfig::new(tokens, 1);
        host = |_, tokens, rows, _, x, _| {
            assert_eq!((tokens, rows), (3, 6));
            x.fill(1);
        };
    }

    kernel! {
        /// As many parameters as a kernel has at most.
        pub unsafe fn sixteen(
            x: &mut [u64], a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64, h: u64, i: u64, j: u64, k: u64, l: u64, m: u64,
            n: u64, o: u64 = a + x.len()
        )
            where n == 14;
        launch = LaunchConfig::for_elements(x.len());
        host = |_, x, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o| {
            x.copy_from_slice(&[a + b + c + d + e + f + g, h + i + j + k + l + m + n, o]);
        };
    }

    kernel! {
        /// Divides in each of the places.
        pub unsafe fn divided(x: &mut [u8], a: u64, b: u64, c: u64, d: u64 = x.len() / c)
            where x.len() / a >= 0;
        launch = LaunchConfig::for_elements(x.len() % b);
        host = |_, x, _, _, _, _| x.fill(1);
    }

    kernel! {
        /// Any extents.
        pub unsafe fn geometry(x: &mut [u8], n: i64, bytes: i64);
        launch = LaunchConfig::new((n, 1), (1, 1)).shared_mem_bytes(bytes);
        host = |_, x, _, _| x.fill(1);
    }

    kernel! {
        /// The caller's geometry.
        pub unsafe fn config(x: &mut [u8])
            where |config| config.threads().wide() <= x.len(), config.blocks() as usize >= 1;
        host = |_, x| x.fill(1);
    }

    #[derive(Clone, Copy, Debug, Pod, Zeroable)]
    #[bytemuck(crate = "gpu_await::bytemuck")]
    #[repr(C)]
    pub(crate) struct Extent {
        pub(crate) rows: u32,
        pub(crate) columns: u32,
    }

    kernel! {
        /// Fields, and arrays of integers.
        pub unsafe fn structs(x: &mut [u8], of: Extent, also: [u32; 2])
            where x.len() == of.rows.wide() * of.columns.wide(), x.len() == also[0].wide() * also[1].wide();
        launch = LaunchConfig::for_elements(x.len());
        host = |_: &Grid, x: &mut [u8], _, _| x.fill(1);
    }
}

fn error(op: Op<()>) -> gpu_await::Error {
    let error = op.queued().expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    error
}

fn stream() -> (Device, Stream) {
    let device = Device::host();
    let stream = device.stream().unwrap();
    (device, stream)
}

/// The first product is 2^32 + 256, which a `u32` takes for 256; the second one is 2^64.
#[test]
fn a_product_does_not_wrap() {
    let (device, stream) = stream();
    let rows_of = rows_of::load_blocking(&device).unwrap();
    let mut x = stream.empty::<u8>(256).queued().unwrap();
    for (rows, columns, planes) in [((1 << 24) + 1, 256, 1), (1 << 30, 1 << 31, 8)] {
        let error = error(rows_of.launch(&stream, &mut x, rows, columns, planes));
        assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
        assert!(error.to_string().contains(&format!("rows = {rows}")), "{error}");
    }
    rows_of.launch(&stream, &mut x, 64, 2, 2).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [1; 256]);
}

#[test]
fn a_derived_argument_fits_its_type() {
    let (device, stream) = stream();
    let derived = derived::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(4).queued().unwrap();
    derived.launch(&stream, &mut x, 1).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [3; 4]);
    let error_at = error(derived.launch(&stream, &mut x, 5));
    let range = |error: &gpu_await::Error| match *error.detail() {
        ErrorDetail::IntegerRange { what, value, least, most, .. } => (what, value, least, most),
        _ => panic!("{error}"),
    };
    assert_eq!(range(&error_at), ("above", -1, 0, u32::MAX.into()));
    assert_eq!(
        error_at.to_string().split(" (").next(),
        Some("kernel `derived` computes above = -1, but its parameter holds 0 to 4294967295")
    );
    let mut long = stream.zeros::<u8>(256).queued().unwrap();
    assert_eq!(range(&error(derived.launch(&stream, &mut long, 0))), ("len", 256, 0, 255));
    // What would have been written counts as failed.
    let read = stream.download(&long).synchronize().unwrap_err();
    assert!(matches!(read.detail(), ErrorDetail::Upstream { .. }), "{read}");
    // And the next launch is judged by itself.
    x.clear_poison().unwrap();
    derived.launch(&stream, &mut x, 2).queued().unwrap();
}

#[test]
fn a_derived_argument_names_later_ones() {
    let (device, stream) = stream();
    let forward = forward::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(12).queued().unwrap();
    let y = stream.zeros::<u8>(8).queued().unwrap();
    let y = y.rows_of(4).unwrap();
    forward.launch(&stream, 4, &mut x, &y).queued().unwrap();
    let error = error(forward.launch(&stream, 0, &mut x, &y));
    assert!(matches!(error.detail(), ErrorDetail::Evaluation { what: "tokens", .. }), "{error}");
}

#[test]
fn a_kernel_of_sixteen_parameters() {
    let (device, stream) = stream();
    let sixteen = sixteen::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u64>(3).queued().unwrap();
    let launch = |x: &mut DeviceBuffer<u64>, n| {
        sixteen.launch(&stream, x, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, n)
    };
    launch(&mut x, 14).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [28, 77, 4]);
    let told = error(launch(&mut x, 15)).to_string();
    assert!(told.contains("n == 14") && told.contains("o = 4"), "{told}");
}

/// In conditions, in the geometry and in derived arguments.
#[test]
fn what_has_no_value_is_refused() {
    let (device, stream) = stream();
    let divided = divided::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(4).queued().unwrap();
    for ((a, b, c), of) in
        [((0, 3, 1), "x.len() / a >= 0"), ((1, 0, 1), "launch"), ((1, 3, 0), "d")]
    {
        let error = error(divided.launch(&stream, &mut x, a, b, c));
        let ErrorDetail::Evaluation { what, message, .. } = error.detail() else {
            panic!("{error}")
        };
        assert_eq!(*what, of);
        assert!(message.contains("zero"), "{message}");
        let read = stream.download(&x).synchronize().unwrap_err();
        assert!(matches!(read.detail(), ErrorDetail::Upstream { .. }), "{read}");
        x.clear_poison().unwrap();
    }
    divided.launch(&stream, &mut x, 1, 3, 1).queued().unwrap();
}

#[test]
fn an_extent_of_a_launch_fits() {
    let (device, stream) = stream();
    let geometry = geometry::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(4).queued().unwrap();
    for (n, bytes) in [(-1, 0), (1 << 32, 0), (1, -8), (1, 1 << 40)] {
        let error = error(geometry.launch(&stream, &mut x, n, bytes));
        let ErrorDetail::LaunchLimit { asked: 0xFFFF_FFFF, .. } = *error.detail() else {
            panic!("{error}")
        };
        x.clear_poison().unwrap();
    }
    geometry.launch(&stream, &mut x, 2, 8).queued().unwrap();
}

/// Outside of a declaration as well.
#[test]
fn a_config_of_fewer_than_none_is_refused() {
    let (device, stream) = stream();
    let whole =
        Kernel::<(Out<u8>,)>::host(&device, "whole", |_: &gpu_await::Grid, x: &mut [u8]| {
            x.fill(1);
        });
    let whole = whole.unwrap().require("!x.is_empty()", |_, (x,)| !x.is_empty());
    let mut x = stream.empty::<u8>(4).queued().unwrap();
    for (config, asked) in [
        (LaunchConfig::for_elements(-1), u64::from(u32::MAX)),
        (LaunchConfig::for_elements(u64::MAX), u64::from(u32::MAX)),
        (LaunchConfig::new(1_u64 << 32, 1), u64::from(u32::MAX)),
        (LaunchConfig::for_extent((-1, 1), (16, 16)), u64::from(u32::MAX)),
        (LaunchConfig::for_extent((1, 1_u64 << 40), (16, 16)), u64::from(u32::MAX)),
    ] {
        let error = error(stream.launch(&whole, config, (&mut x,)));
        let ErrorDetail::LaunchLimit { what: LaunchLimit::Grid(_), asked: found, .. } =
            error.detail()
        else {
            panic!("{error}")
        };
        assert_eq!(*found, asked);
    }
    // Nothing along one axis makes the other one no better.
    for extent in [(0, -1), (-1, 0)] {
        error(stream.launch(&whole, LaunchConfig::for_extent(extent, (1, 1)), (&mut x,)));
    }
    stream.launch(&whole, LaunchConfig::for_elements(4_usize), (&mut x,)).queued().unwrap();
    assert_eq!(LaunchConfig::for_elements(0_u8), LaunchConfig::nothing());
}

/// A geometry has up to 2^96 blocks, times 2^96 threads.
#[test]
fn a_geometry_does_not_saturate() {
    let (device, stream) = stream();
    let config = config::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(4).queued().unwrap();
    config.launch(&stream, LaunchConfig::new(2, 2), &mut x).queued().unwrap();
    let large = LaunchConfig::new((1 << 31, 65_535, 65_535), (1, 1, 1));
    let error = error(config.launch(&stream, large, &mut x));
    assert!(
        matches!(
            error.detail(),
            ErrorDetail::Precondition { .. } | ErrorDetail::LaunchLimit { .. }
        ),
        "{error}"
    );
}

#[test]
fn fields_and_arrays_do_not_wrap() {
    let (device, stream) = stream();
    let structs = structs::load_blocking(&device).unwrap();
    let mut x = stream.zeros::<u8>(16).queued().unwrap();
    let of = Extent { rows: 4, columns: 4 };
    structs.launch(&stream, &mut x, of, [2, 8]).queued().unwrap();
    let wide = (1 << 28) + 1;
    for (of, also) in [(Extent { rows: wide, columns: 16 }, [2, 8]), (of, [wide, 16])] {
        let error = error(structs.launch(&stream, &mut x, of, also));
        assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
        x.clear_poison().unwrap();
    }
}
