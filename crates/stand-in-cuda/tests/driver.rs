//! That the stand-in keeps the rules of the driver, seen through cudarc's declarations of its functions.
//!
//! Each test runs itself again in a child process, so that each has a driver of its own.

#![cfg(target_os = "linux")]

use std::ffi::{CString, c_void};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS_v2, CUcontext, CUdevResource, CUdevResourceDesc,
    CUdevResourceType, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgreenCtx, CUkernel, CUlibrary,
    CUmodule, CUstream, CUstream_flags,
};
use stand_in_cuda::{
    StandIn, VARIABLE, assert_child, assert_child_without, install, is_child, test_of,
    under_the_stand_in,
};

const INVALID_VALUE: i32 = 1;
const NOT_INITIALIZED: i32 = 3;
const INVALID_CONTEXT: i32 = 201;
const INVALID_PTX: i32 = 218;
const INVALID_HANDLE: i32 = 400;
const NOT_READY: i32 = 600;
const CONTEXT_IS_DESTROYED: i32 = 709;
const LAUNCH_FAILED: i32 = 719;
const NOT_PERMITTED: i32 = 800;
const INVALID_RESOURCE_TYPE: i32 = 914;
const INVALID_RESOURCE_CONFIGURATION: i32 = 915;
/// A piece of memory with a descriptor.
const MAPPED: usize = 2 << 20;
/// What fresh device memory holds.
const POISON: u32 = 0xCDCD_CDCD;

/// Calls a driver function, and gives the code that it returns.
macro_rules! code {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: pointers are to live variables of the right type; handles are the stand-in's own,
        // and it refuses those that are not.
        let result = unsafe { sys::$name($($argument),*) };
        result as i32
    }};
}

/// Calls a driver function that must succeed.
macro_rules! done {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(code!($name($($argument),*)), 0, stringify!($name))
    };
}

/// As [`under_the_stand_in`], where misuse is what is looked for.
fn misusing<F: FnOnce(&StandIn)>(body: F) {
    if is_child() { body(&StandIn::open()) } else { assert_child(test_of::<F>(), &[]) }
}

/// Makes the device's context current.
fn start() {
    done!(cuInit(0));
    let mut context: CUcontext = null_mut();
    done!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    done!(cuCtxSetCurrent(context));
}

fn stream() -> CUstream {
    let mut stream: CUstream = null_mut();
    done!(cuStreamCreate(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
    stream
}

fn event() -> CUevent {
    let mut event: CUevent = null_mut();
    done!(cuEventCreate(&raw mut event, 0));
    event
}

/// Memory for one word.
fn word(stream: CUstream) -> CUdeviceptr {
    let mut word = 0;
    done!(cuMemAllocAsync(&raw mut word, 4, stream));
    word
}

/// One word of host memory that copies go to without waiting.
struct Pinned(Box<AtomicU32>);

impl Pinned {
    fn new() -> Self {
        let word = Box::new(AtomicU32::new(0));
        done!(cuMemHostRegister_v2(word.as_ptr().cast(), 4, 0));
        Pinned(word)
    }

    fn address(&self) -> *mut c_void {
        self.0.as_ptr().cast()
    }

    fn value(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

fn kernel(source: &str, name: &str) -> CUfunction {
    let (image, name) = (CString::new(source).unwrap(), CString::new(name).unwrap());
    let (mut module, mut function): (CUmodule, CUfunction) = (null_mut(), null_mut());
    done!(cuModuleLoadData(&raw mut module, image.as_ptr().cast()));
    done!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    function
}

#[test]
fn a_stream_runs_its_commands_in_order() {
    under_the_stand_in(|driver| {
        start();
        let (stream, to, end) = (stream(), Pinned::new(), event());
        let word = word(stream);
        let held = driver.hold();
        done!(cuMemcpyDtoHAsync_v2(to.address(), word, 4, stream));
        for value in [1, 2, 3] {
            done!(cuMemsetD32Async(word, value, 1, stream));
        }
        done!(cuEventRecord(end, stream));
        assert_eq!(code!(cuEventQuery(end)), NOT_READY);
        assert_eq!(to.value(), 0, "a command ran within its call");
        drop(held);
        done!(cuStreamSynchronize(stream));
        assert_eq!(to.value(), POISON, "the copy came before the fills");
        done!(cuEventQuery(end));
        done!(cuMemcpyDtoHAsync_v2(to.address(), word, 4, stream));
        done!(cuStreamSynchronize(stream));
        assert_eq!(to.value(), 3);
    });
}

#[test]
fn a_wait_orders_one_stream_behind_another() {
    under_the_stand_in(|_| {
        start();
        let (first, second, third) = (stream(), stream(), stream());
        let (half, end, to) = (event(), event(), Pinned::new());
        let (gate, x) = (word(third), word(third));
        done!(cuMemsetD32Async(gate, 0, 1, third));
        done!(cuStreamSynchronize(third));
        let function = kernel(include_str!("../../../kernels/gate.ptx"), "gate");
        let (mut word, mut timeout_ns) = (gate, 20_000_000_000u64);
        let mut arguments = [(&raw mut word).cast::<c_void>(), (&raw mut timeout_ns).cast()];
        let arguments = arguments.as_mut_ptr();
        done!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, first, arguments, null_mut()));
        done!(cuMemsetD32Async(x, 7, 1, first));
        done!(cuEventRecord(half, first));
        done!(cuStreamWaitEvent(second, half, 0));
        done!(cuMemcpyDtoHAsync_v2(to.address(), x, 4, second));
        done!(cuEventRecord(end, second));
        // What is recorded after the wait does not count.
        done!(cuEventRecord(half, third));
        done!(cuStreamSynchronize(third));
        assert_eq!((code!(cuEventQuery(half)), code!(cuEventQuery(end))), (0, NOT_READY));
        done!(cuMemsetD32Async(gate, 1, 1, third));
        done!(cuStreamSynchronize(second));
        assert_eq!(to.value(), 7);
    });
}

#[test]
fn an_event_without_a_record_is_complete() {
    under_the_stand_in(|driver| {
        start();
        let (stream, event) = (stream(), event());
        done!(cuEventQuery(event));
        let held = driver.hold();
        done!(cuEventRecord(event, stream));
        assert_eq!(code!(cuEventQuery(event)), NOT_READY);
        drop(held);
        done!(cuStreamSynchronize(stream));
        done!(cuEventQuery(event));
    });
}

#[test]
fn a_driver_wants_to_be_initialized_and_a_context() {
    misusing(|driver| {
        let (mut stream, mut context): (CUstream, CUcontext) = (null_mut(), null_mut());
        assert_eq!(code!(cuDevicePrimaryCtxRetain(&raw mut context, 0)), NOT_INITIALIZED);
        done!(cuInit(0));
        assert_eq!(code!(cuStreamCreate(&raw mut stream, 0)), INVALID_CONTEXT);
        assert_eq!(driver.live("stream"), 0);
        start();
        done!(cuStreamCreate(&raw mut stream, 0));
        assert_eq!(driver.live("stream"), 1);
    });
}

#[test]
fn a_destroyed_handle_is_misuse() {
    misusing(|driver| {
        start();
        let (stream, event) = (stream(), event());
        // It has work to end, and is no handle any more all the same.
        let held = driver.hold();
        done!(cuMemsetD32Async(word(stream), 1, 1, stream));
        done!(cuStreamDestroy_v2(stream));
        assert_eq!(driver.misuse(), [""; 0]);
        assert_eq!(code!(cuStreamDestroy_v2(stream)), INVALID_HANDLE);
        assert_eq!(code!(cuEventRecord(event, stream)), INVALID_HANDLE);
        assert_eq!(code!(cuEventQuery(stream.cast())), INVALID_HANDLE);
        assert_eq!(driver.misuse().len(), 3, "{:?}", driver.misuse());
        assert!(driver.misuse()[0].contains("is no live stream"), "{:?}", driver.misuse());
        drop(held);
    });
}

#[test]
fn an_address_is_known_by_its_allocation() {
    under_the_stand_in(|_| {
        start();
        let mut memory: CUdeviceptr = 0;
        done!(cuMemAlloc_v2(&raw mut memory, 1000));
        let ask = |attribute, address| -> (i32, u64) {
            let mut answer = 0_u64;
            let attribute: sys::CUpointer_attribute = attribute;
            let code = code!(cuPointerGetAttribute((&raw mut answer).cast(), attribute, address));
            (code, answer)
        };
        use sys::CUpointer_attribute as Attribute;
        assert_eq!(ask(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + 999), (0, 2));
        assert_eq!(ask(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory + 10), (0, 0));
        assert_eq!(ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, memory + 10), (0, memory));
        assert_eq!(ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory + 10), (0, 1000));
        let elsewhere = (&raw const memory) as u64;
        assert_eq!(ask(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, elsewhere), (1, 0));
    });
}

#[test]
fn memory_that_goes_before_its_command_is_misuse() {
    misusing(|driver| {
        start();
        let (stream, other, from) = (stream(), stream(), Pinned::new());
        let word = word(stream);
        done!(cuStreamSynchronize(stream));
        let held = driver.hold();
        done!(cuMemcpyHtoDAsync_v2(word, from.address(), 4, stream));
        done!(cuMemHostUnregister(from.address()));
        assert_eq!(driver.misuse().len(), 1, "{:?}", driver.misuse());
        assert!(driver.misuse()[0].contains("goes while 1 queued"), "{:?}", driver.misuse());
        drop(held);
        done!(cuStreamSynchronize(stream));

        // Freed in the order of a stream that this one does not wait for.
        done!(cuMemFreeAsync(word, other));
        done!(cuStreamSynchronize(other));
        let misused = driver.misuse().len();
        assert_ne!(code!(cuMemsetD32Async(word, 1, 1, stream)), 0);
        assert_eq!(driver.misuse().len(), misused + 1, "{:?}", driver.misuse());
        assert_eq!(driver.live("memory"), 0);
    });
}

/// As seen on an H200: whole chunks count against the maximum, and the end of one is not joined with the next.
#[test]
fn a_pool_reserves_whole_chunks() {
    const OUT_OF_MEMORY: i32 = 2;
    const MIB: usize = 1 << 20;
    under_the_stand_in(|_| {
        start();
        let stream = stream();
        // SAFETY: integers, a pointer and enums of C, each of which has a 0.
        let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        props.maxSize = 64 * MIB;
        let mut pool = null_mut();
        done!(cuMemPoolCreate(&raw mut pool, &raw const props));
        let allocate = |bytes| {
            let mut address: CUdeviceptr = 0;
            (code!(cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream)), address)
        };
        let reserved = || {
            let mut bytes = 0_u64;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
            done!(cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()));
            bytes
        };
        let (small, large) = (allocate(512), allocate(60 * MIB));
        assert_eq!((small.0, large.0, reserved()), (0, OUT_OF_MEMORY, 32 << 20));
        // Beside it in its chunk, and over the free in front.
        let beside = allocate(20 * MIB).1;
        done!(cuMemFreeAsync(beside, stream));
        let over = allocate(30 * MIB);
        assert_eq!((over.0, reserved()), (0, 32 << 20));
        // An empty chunk goes when the pool is trimmed, and not before.
        done!(cuMemFreeAsync(small.1, stream));
        done!(cuMemFreeAsync(over.1, stream));
        done!(cuStreamSynchronize(stream));
        assert_eq!((allocate(60 * MIB).0, reserved()), (OUT_OF_MEMORY, 32 << 20));
        done!(cuMemPoolTrimTo(pool, 0));
        let large = allocate(60 * MIB);
        assert_eq!((large.0, reserved()), (0, 64 << 20));
        done!(cuMemFreeAsync(large.1, stream));
        done!(cuMemPoolDestroy(pool));
    });
}

/// Counts its runs.
unsafe extern "C" fn count(counter: *mut c_void) {
    // SAFETY: the tests hand over a counter that outlives the stream.
    unsafe { &*counter.cast::<AtomicI32>() }.fetch_add(1, Ordering::SeqCst);
}

/// Memory with a descriptor: reserved, mapped, written where its access says so, and gone with its last mapping.
#[test]
fn a_read_only_mapping_is_not_written() {
    misusing(|driver| {
        start();
        // SAFETY: all zeros is a valid description.
        let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes =
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let (mut handle, mut imported, mut number) = (0, 0, -1_i32);
        assert_eq!(code!(cuMemCreate(&raw mut handle, 4096, &raw const prop, 0)), INVALID_VALUE);
        done!(cuMemCreate(&raw mut handle, MAPPED, &raw const prop, 0));
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let to = (&raw mut number).cast::<c_void>();
        done!(cuMemExportToShareableHandle(to, handle, kind, 0));
        let descriptor = number as usize as *mut c_void;
        done!(cuMemImportFromShareableHandle(&raw mut imported, descriptor, kind));
        assert_eq!(
            code!(cuMemImportFromShareableHandle(&raw mut imported, null_mut(), kind)),
            INVALID_VALUE
        );
        let map = |handle, flags| {
            let mut address = 0;
            done!(cuMemAddressReserve(&raw mut address, MAPPED, 0, 0, 0));
            assert_eq!(code!(cuMemMap(address, 2 * MAPPED, 0, handle, 0)), INVALID_VALUE);
            done!(cuMemMap(address, MAPPED, 0, handle, 0));
            let access = sys::CUmemAccessDesc { location: prop.location, flags };
            done!(cuMemSetAccess(address, MAPPED, &raw const access, 1));
            address
        };
        let ours = map(handle, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        let theirs = map(imported, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ);
        done!(cuMemRelease(handle));
        done!(cuMemRelease(imported));
        let stream = stream();
        let mut seen = [0_u32; 2];
        done!(cuMemsetD32Async(ours, 7, 2, stream));
        let before = driver.misuse().len();
        done!(cuMemsetD32Async(theirs, 8, 2, stream));
        done!(cuMemcpyDtoHAsync_v2(seen.as_mut_ptr().cast(), theirs, 8, stream));
        done!(cuStreamSynchronize(stream));
        assert_eq!((seen, driver.misuse().len()), ([7; 2], before + 1));
        for address in [ours, theirs] {
            assert_eq!(code!(cuMemAddressFree(address, MAPPED)), INVALID_VALUE, "it is mapped");
            done!(cuMemUnmap(address, MAPPED));
            done!(cuMemAddressFree(address, MAPPED));
        }
        assert_eq!(code!(cuMemUnmap(ours, MAPPED)), INVALID_VALUE);
        assert_eq!(driver.live("shared"), 0);
    });
}

#[test]
fn a_lost_device_stays_lost() {
    static RUNS: AtomicI32 = AtomicI32::new(0);
    misusing(|driver| {
        start();
        let (stream, end, to) = (stream(), event(), Pinned::new());
        let word = word(stream);
        let counter = (&raw const RUNS).cast_mut().cast();
        done!(cuLaunchHostFunc(stream, Some(count), counter));
        done!(cuStreamSynchronize(stream));
        let held = driver.hold();
        done!(cuMemcpyDtoHAsync_v2(to.address(), word, 4, stream));
        done!(cuLaunchHostFunc(stream, Some(count), counter));
        done!(cuEventRecord(end, stream));
        driver.lose(0, LAUNCH_FAILED);
        drop(held);
        assert_eq!(code!(cuStreamSynchronize(stream)), LAUNCH_FAILED);
        assert_eq!(code!(cuEventQuery(end)), LAUNCH_FAILED);
        // A moment for what must not come.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let ran = (to.value(), RUNS.load(Ordering::SeqCst));
        assert_eq!(ran, (0, 1), "what was queued ran");
        assert_eq!(code!(cuMemsetD32Async(word, 1, 1, stream)), LAUNCH_FAILED);
        let mut other: CUstream = null_mut();
        assert_eq!(code!(cuStreamCreate(&raw mut other, 0)), LAUNCH_FAILED);
        // What ends things fails and ends them all the same.
        assert_eq!(code!(cuMemFreeAsync(word, stream)), LAUNCH_FAILED);
        assert_eq!(code!(cuStreamDestroy_v2(stream)), LAUNCH_FAILED);
        assert_eq!((driver.live("memory"), driver.live("stream")), (0, 0));
    });
}

/// Asks the driver for its version, and leaves the answer's code.
unsafe extern "C" fn call_the_driver(code: *mut c_void) {
    let mut version = 0;
    let answer = code!(cuDriverGetVersion(&raw mut version));
    // SAFETY: the test hands over a cell that outlives the stream.
    unsafe { &*code.cast::<AtomicI32>() }.store(answer, Ordering::SeqCst);
}

#[test]
fn a_host_function_that_calls_the_driver_is_misuse() {
    static CODE: AtomicI32 = AtomicI32::new(-1);
    misusing(|driver| {
        start();
        let stream = stream();
        let code = (&raw const CODE).cast_mut().cast();
        done!(cuLaunchHostFunc(stream, Some(call_the_driver), code));
        done!(cuStreamSynchronize(stream));
        assert_eq!(CODE.load(Ordering::SeqCst), NOT_PERMITTED);
        assert_eq!(driver.misuse().len(), 1, "{:?}", driver.misuse());
        assert!(driver.misuse()[0].starts_with("cuDriverGetVersion"), "{:?}", driver.misuse());
    });
}

#[test]
fn a_failure_strikes_the_call_that_it_is_for() {
    under_the_stand_in(|driver| {
        start();
        let mut stream: CUstream = null_mut();
        driver.fail("cuStreamCreate", 2, 2);
        let codes = [(); 3].map(|()| code!(cuStreamCreate(&raw mut stream, 0)));
        assert_eq!(codes, [0, 2, 0]);
        assert_eq!(driver.live("stream"), 2);
        driver.fail_after_effect("cuStreamCreate", 1, 2);
        assert_eq!(code!(cuStreamCreate(&raw mut stream, 0)), 2);
        assert_eq!(driver.live("stream"), 3);
        driver.fail("cuStreamCreate", 5, 2);
        assert_eq!((driver.forgive(), driver.forgive()), (1, 0));
    });
}

#[test]
fn calls_are_written_down_as_they_were_made() {
    under_the_stand_in(|driver| {
        start();
        let (stream, event) = (stream(), event());
        let held = driver.hold();
        done!(cuEventRecord(event, stream));
        driver.clear();
        let word = word(stream);
        done!(cuMemsetD32Async(word, 9, 1, stream));
        assert_eq!(code!(cuEventQuery(event)), NOT_READY);
        drop(held);
        let thread = driver.thread();
        let calls = driver.calls();
        assert_eq!(driver.names(), ["cuMemAllocAsync", "cuMemsetD32Async", "cuEventQuery"]);
        assert_eq!(driver.count(), 3);
        assert_eq!(calls[2], format!("cuEventQuery event=1 thread={thread} result=600"));
        assert!(calls[1].contains(" to=memory1+0 "), "{}", calls[1]);
        assert!(calls[1].contains(" stream=1 "), "{}", calls[1]);
        done!(cuStreamSynchronize(stream));
    });
}

const NOTHING: CUdevResource = {
    // SAFETY: integers, and a union of such.
    unsafe { std::mem::zeroed() }
};

/// All multiprocessors of device 0.
fn whole() -> CUdevResource {
    let mut whole = NOTHING;
    let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    done!(cuDeviceGetDevResource(0, &raw mut whole, kind));
    whole
}

/// Groups of at least so many, and what is left.
fn split(least: u32) -> (Vec<CUdevResource>, CUdevResource) {
    let (whole, mut rest, mut count) = (whole(), NOTHING, 0);
    let none = null_mut();
    done!(cuDevSmResourceSplitByCount(none, &raw mut count, &raw const whole, none, 0, least));
    let mut groups = vec![NOTHING; count as usize];
    let (to, from) = (groups.as_mut_ptr(), &raw const whole);
    done!(cuDevSmResourceSplitByCount(to, &raw mut count, from, &raw mut rest, 0, least));
    (groups, rest)
}

fn multiprocessors(resource: &CUdevResource) -> u32 {
    // SAFETY: each is one of multiprocessors.
    unsafe { resource.__bindgen_anon_1.sm }.smCount
}

fn describe(mut resources: Vec<CUdevResource>) -> Result<CUdevResourceDesc, i32> {
    let mut described: CUdevResourceDesc = null_mut();
    let (first, count) = (resources.as_mut_ptr(), resources.len() as u32);
    match code!(cuDevResourceGenerateDesc(&raw mut described, first, count)) {
        0 => Ok(described),
        code => Err(code),
    }
}

/// A green context of these, the same as a context, and a stream of it.
fn green(resources: Vec<CUdevResource>) -> (CUgreenCtx, CUcontext, CUstream) {
    let described = describe(resources).unwrap();
    let (mut green, mut context, mut stream) = (null_mut(), null_mut(), null_mut());
    done!(cuGreenCtxCreate(&raw mut green, described, 0, 1));
    done!(cuCtxFromGreenCtx(&raw mut context, green));
    done!(cuGreenCtxStreamCreate(&raw mut stream, green, 1, 0));
    (green, context, stream)
}

#[test]
fn groups_of_one_split_are_joined() {
    under_the_stand_in(|_| {
        start();
        let (groups, rest) = split(1);
        assert_eq!(
            (groups.len(), multiprocessors(&groups[0]), multiprocessors(&rest)),
            (15, 8, 12)
        );
        assert_eq!(multiprocessors(&split(9).0[0]), 16);
        describe(vec![groups[0], groups[7], rest]).unwrap();
        let other = split(1).0;
        for refused in
            [vec![groups[0], other[1]], vec![groups[3], groups[3]], vec![groups[0], whole()]]
        {
            assert_eq!(describe(refused), Err(INVALID_RESOURCE_CONFIGURATION));
        }
        assert_eq!(describe(vec![NOTHING]), Err(INVALID_RESOURCE_TYPE));
        assert_eq!(describe(Vec::new()), Err(INVALID_VALUE));
        let (mut count, none) = (0, null_mut());
        let least = 121;
        let whole = whole();
        let few = code!(cuDevSmResourceSplitByCount(
            none,
            &raw mut count,
            &raw const whole,
            none,
            0,
            least
        ));
        assert_eq!(few, INVALID_RESOURCE_CONFIGURATION, "too few multiprocessors");
        let group = &raw const groups[0];
        let again = code!(cuDevSmResourceSplitByCount(none, &raw mut count, group, none, 0, 1));
        assert_eq!(again, INVALID_RESOURCE_CONFIGURATION);
    });
}

#[test]
fn a_stream_goes_with_its_green_context() {
    misusing(|driver| {
        start();
        let (green, context, stream) = green(vec![split(1).0[0]]);
        let (mut primary, mut of) = (null_mut(), null_mut());
        done!(cuStreamGetCtx_v2(stream, &raw mut primary, &raw mut of));
        let mut current = null_mut();
        done!(cuCtxGetCurrent(&raw mut current));
        assert_eq!((primary, of), (current, green));
        done!(cuStreamQuery(stream));
        done!(cuGreenCtxDestroy(green));
        assert!(driver.calls().last().unwrap().contains("streams=1 nodes=0"));
        assert_eq!(code!(cuStreamQuery(stream)), CONTEXT_IS_DESTROYED);
        assert_eq!(code!(cuEventRecord(event(), stream)), CONTEXT_IS_DESTROYED);
        assert_eq!(code!(cuCtxPushCurrent_v2(context)), CONTEXT_IS_DESTROYED);
        done!(cuStreamDestroy_v2(stream));
        assert_eq!(driver.misuse(), [""; 0]);
        assert_eq!(code!(cuGreenCtxDestroy(green)), INVALID_HANDLE);
        assert_eq!(driver.misuse().len(), 1);
        assert_eq!(driver.live("green"), 0);
    });
}

/// A node is in the context that it names with a kernel; with a function, in that of the function.
#[test]
fn a_node_names_its_context_with_a_kernel() {
    under_the_stand_in(|driver| {
        start();
        let (_, context, stream) = green(vec![split(1).0[2]]);
        let text = CString::new(".visible .entry empty() { ret; }").unwrap();
        let (mut library, mut kernel, mut function): (CUlibrary, CUkernel, CUfunction) =
            (null_mut(), null_mut(), null_mut());
        let (none, nothing) = (null_mut(), null_mut());
        let (options, values) = (null_mut(), null_mut());
        let image = text.as_ptr().cast();
        done!(cuLibraryLoadData(&raw mut library, image, none, nothing, 0, options, values, 0));
        done!(cuLibraryGetKernel(&raw mut kernel, library, c"empty".as_ptr()));
        done!(cuKernelGetFunction(&raw mut function, kernel));
        let outside = self::stream();
        for (func, kern, on) in [
            (function, null_mut(), "0-131"),
            (null_mut(), kernel, "16-23"),
            (kernel.cast(), null_mut(), "16-23"),
        ] {
            let (mut graph, mut node, mut exec): (CUgraph, _, _) =
                (null_mut(), null_mut(), null_mut());
            done!(cuGraphCreate(&raw mut graph, 0));
            let params = one_thread(func, kern, context);
            done!(cuGraphAddKernelNode_v2(&raw mut node, graph, null_mut(), 0, &raw const params));
            done!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            for launched in [stream, outside] {
                driver.clear();
                done!(cuGraphLaunch(exec, launched));
                done!(cuStreamSynchronize(launched));
                assert_eq!(driver.places(), [format!("empty on={on}")]);
            }
        }
        driver.clear();
        let (none, arguments) = (null_mut(), null_mut());
        done!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, none));
        assert_eq!(driver.places(), ["empty on=16-23"]);
        done!(cuStreamSynchronize(stream));
    });
}

/// A node of one thread without arguments: of a function, or of a kernel in a context.
fn one_thread(func: CUfunction, kern: CUkernel, ctx: CUcontext) -> CUDA_KERNEL_NODE_PARAMS_v2 {
    CUDA_KERNEL_NODE_PARAMS_v2 {
        func,
        kern,
        ctx,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: null_mut(),
        extra: null_mut(),
    }
}

/// A programmatic edge leads from a kernel to a kernel that is behind no other.
#[test]
fn programmatic_edges_between_two_kernels() {
    under_the_stand_in(|_| {
        start();
        let func = kernel(".visible .entry empty() { ret; }", "empty");
        let mut graph: CUgraph = null_mut();
        done!(cuGraphCreate(&raw mut graph, 0));
        let params = one_thread(func, null_mut(), null_mut());
        let nodes = [(); 3].map(|()| {
            let mut node = null_mut();
            done!(cuGraphAddKernelNode_v2(&raw mut node, graph, null_mut(), 0, &raw const params));
            node
        });
        let full = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
        let programmatic = sys::CUgraphEdgeData { from_port: 1, type_: 1, ..full };
        let add = |from: usize, to: usize, data| {
            let (from, to, data) = (&raw const nodes[from], &raw const nodes[to], &raw const data);
            code!(cuGraphAddDependencies_v2(graph, from, to, data, 1))
        };
        assert_eq!(add(0, 1, programmatic), 0);
        assert_eq!(add(1, 2, full), 0);
        for (from, data) in [(0, programmatic), (0, sys::CUgraphEdgeData { type_: 1, ..full })] {
            assert_eq!(add(from, 2, data), INVALID_VALUE);
        }
        assert_eq!(add(2, 0, full), INVALID_VALUE);
    });
}

/// A library is loaded whatever is in it; what is wrong with it is in its log, and told by those who look something up.
#[test]
fn a_library_tells_its_error_late() {
    under_the_stand_in(|driver| {
        start();
        let text = CString::new(".entry a() { syntax error }").unwrap();
        let mut log = [0_u8; 200];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len())];
        let (mut library, mut kernel, mut module): (CUlibrary, CUkernel, CUmodule) =
            (null_mut(), null_mut(), null_mut());
        let (names, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        let (none, nothing) = (null_mut(), null_mut());
        let image = text.as_ptr().cast();
        done!(cuLibraryLoadData(&raw mut library, image, names, values, 2, none, nothing, 0));
        assert!(String::from_utf8_lossy(&log).contains("Parsing error"));
        assert_eq!(code!(cuLibraryGetKernel(&raw mut kernel, library, c"a".as_ptr())), INVALID_PTX);
        assert_eq!(code!(cuLibraryGetModule(&raw mut module, library)), INVALID_PTX);
        done!(cuLibraryUnload(library));
        assert_eq!(driver.live("module"), 0);
    });
}

/// As on an older driver: whoever looks for one of them finds none, and the others work.
#[test]
fn functions_that_are_not_there() {
    if !is_child() {
        let name = "functions_that_are_not_there";
        return assert_child_without(&["cuGreenCtxCreate"], name, &[]);
    }
    let driver = StandIn::open();
    start();
    // SAFETY: it is only looked for.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    for (name, is_there) in [(c"cuGreenCtxCreate", false), (c"cuGreenCtxDestroy", true)] {
        // SAFETY: likewise.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()) };
        assert_eq!(found.is_ok(), is_there, "{name:?}");
    }
    assert_eq!(driver.misuse(), [""; 0]);
}

/// Else a library that another build left would be believed.
#[test]
fn a_library_of_other_sources_is_refused() {
    if is_child() {
        drop(StandIn::open());
        return;
    }
    if std::env::var("GPU_AWAIT_TEST_DEVICE").is_ok_and(|device| device.starts_with("cuda")) {
        return; // a real driver is asked for, and the stand-in is not built
    }
    let installed = install();
    let library = installed.path().join("libcuda.so.1");
    let mut bytes = std::fs::read(&library).unwrap();
    let mark = env!("STAND_IN_SOURCES").as_bytes();
    let at = bytes.windows(mark.len()).position(|part| part == mark).expect("its mark");
    // Two names of one file: written in place, both change.
    bytes[at..at + mark.len()].fill(b'x');
    std::fs::write(&library, bytes).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_library_of_other_sources_is_refused", "--nocapture"])
        .env("LD_LIBRARY_PATH", installed.library_path())
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stderr).into_owned();
    assert!(!child.status.success() && text.contains("made of other sources"), "{text}");
}
