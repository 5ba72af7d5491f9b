//! Memory that several processes share.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use futures::FutureExt;
use futures::future::try_join_all;
use gpu_await::sibling::mutable;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceKind, ErrorDetail, ErrorKind, Frozen, Region, Result, SharedDescriptors,
    SharedProblem, kernels,
};

use crate::under_test::child;
use crate::under_test::descriptors::{
    astray, bytes_of, memfd, receive, send, socket, start_with_socket,
};
use crate::under_test::eventually::eventually;

/// Of an odd number of bytes.
const LEN: usize = 3 * 333_333;
const MIB: u64 = 1 << 20;
const ALL_SEALS: i32 =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;

fn pattern() -> Vec<u32> {
    (0..LEN as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

/// Sealed memory with the pattern.
async fn sealed(device: &Device, generation: u64) -> Result<(Frozen<u32>, SharedDescriptors)> {
    let mut buffer = device.shared::<u32>(LEN).await?;
    let data = device.upload(pattern()).queued()?;
    device.copy(&data, &mut buffer).queued()?;
    buffer.seal(device, generation).await
}

fn problem(error: &gpu_await::Error) -> &SharedProblem {
    match error.detail() {
        ErrorDetail::BadShared { problem } => problem,
        other => panic!("{other}"),
    }
}

/// Descriptors of a buffer that can still be written, with the header of another one that has the same contents. (A GPU's descriptors have no
/// seals.)
#[tokio::test]
async fn a_header_of_other_memory_makes_nothing_read_only() -> Result<()> {
    let device = testing::device();
    if device.kind() != DeviceKind::Host {
        return Ok(());
    }
    let mut open = device.shared::<u32>(LEN).await?;
    device.copy(&device.upload(pattern()).queued()?, &mut open).queued()?;
    let (_, SharedDescriptors { header, .. }) = sealed(&device, 1).await?;
    let mixed = SharedDescriptors { memory: open.descriptors()?.memory, header };
    let error = device.import_shared::<u32>(&mixed, LEN, 1).await.unwrap_err();
    assert!(matches!(problem(&error), SharedProblem::NotShared { .. }), "{error}");
    Ok(())
}

/// The memory of a process that died, held by one that has no device, is read by a third.
#[tokio::test]
async fn memory_outlives_its_maker() -> Result<()> {
    const NAME: &str = concat!(module_path!(), "::memory_outlives_its_maker");
    match child::parameter().as_deref() {
        Some("maker") => {
            let (memory, descriptors) = sealed(&testing::device(), 7).await?;
            send(&socket(), &descriptors);
            drop(memory);
            // Without any end of its own.
            std::process::abort();
        }
        Some("reader") => {
            let device = testing::device();
            let stream = device.stream()?;
            let descriptors = receive(&socket());
            let memory = device.import_shared::<u32>(&descriptors, LEN, 7).await?;
            drop(descriptors);
            assert!(stream.download(&memory).await? == pattern());
            let info = device.memory()?;
            assert_eq!((info.imported_bytes, info.shared_bytes), (4 * MIB, 0));
            return Ok(());
        }
        _ => {}
    }
    let (mut maker, from_maker) = start_with_socket(child::command(NAME, "maker"));
    let descriptors = receive(&from_maker);
    assert!(!maker.wait().expect("its end").success(), "it was aborted");
    let info = descriptors.info()?;
    assert_eq!((info.len, info.generation, info.element.as_str()), (LEN as u64, 7, "u32"));
    assert_eq!((info.size_bytes, info.granularity_bytes), (4 * MIB, 2 * MIB));
    let mut command = child::command(NAME, "reader");
    let (ours, theirs) = UnixStream::pair().expect("a socket");
    command.stdin(OwnedFd::from(theirs));
    send(&ours, &descriptors);
    child::run_command(command, NAME, "reader");
    Ok(())
}

#[tokio::test]
async fn what_is_not_sealed_is_refused() -> Result<()> {
    let device = testing::device();
    let mut buffer = device.shared::<u32>(LEN).await?;
    let descriptors = buffer.descriptors()?;
    let refused = |error: gpu_await::Error| {
        assert_eq!(*problem(&error), SharedProblem::NotSealed);
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
    };
    refused(descriptors.info().unwrap_err());
    refused(device.import_shared::<u32>(&descriptors, LEN, 0).await.unwrap_err());
    // Nobody wrote all of it.
    device.fill(&mut buffer.view_mut().slice_mut(1..)?, 1).queued()?;
    let error = buffer.seal(&device, 0).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    refused(device.import_shared::<u32>(&descriptors, LEN, 0).await.unwrap_err());
    let (_memory, of_another) = sealed(&device, 0).await?;
    device.import_shared::<u32>(&of_another, LEN, 0).await?;
    Ok(())
}

#[tokio::test]
async fn sealing_waits_for_every_use() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut buffer = device.shared::<u32>(LEN).await?;
    let mut copy = b.zeros::<u32>(LEN).await?;
    // The kernel is loaded, which must not wait for a gate.
    sealed(&device, 0).await?;
    let writer = Gate::close(&a)?;
    a.fill(&mut buffer, 5).queued()?;
    let reader = Gate::close(&b)?;
    b.copy(&buffer, &mut copy).queued()?;
    let mut seal = Box::pin(buffer.seal(&device, 1));
    assert!((&mut seal).now_or_never().is_none(), "it is being written");
    writer.open();
    a.synchronize()?;
    // Time for its steps on other threads, if it takes them too early.
    for _ in 0..1000 {
        assert!((&mut seal).now_or_never().is_none(), "it is being read");
        tokio::task::spawn_blocking(std::thread::yield_now).await.expect("a thread");
    }
    reader.open();
    let (memory, _descriptors) = seal.await?;
    assert!(a.download(&memory).await? == [5; LEN]);
    assert!(b.download(&copy).await? == [5; LEN]);
    Ok(())
}

#[tokio::test]
async fn imported_memory_is_frozen_memory() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut buffer = device.shared::<f32>(LEN).await?;
    stream.fill(&mut buffer, 1.5).queued()?;
    // Before it is sealed it is a buffer like any other.
    kernels::scale::load(&device).await?.launch(&stream, 2.0, &mut buffer).queued()?;
    assert_eq!((buffer.len(), buffer.size_bytes()), (LEN, 4 * LEN));
    assert!(format!("{buffer:?}").starts_with("SharedBuffer(DeviceBuffer<f32>"));
    let (_ours, descriptors) = buffer.seal(&device, 1).await?;
    let theirs = device.import_shared::<f32>(&descriptors, LEN, 1).await?;
    let axpy = kernels::axpy::load(&device).await?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    axpy.launch(&stream, 1.0, &theirs, &mut y).queued()?;
    let mut region = Region::new();
    for _ in 0..3 {
        stream.replay(&mut region, |queue| axpy.launch(queue, 1.0, &theirs, &mut y)).await?;
    }
    assert!(stream.download(&y).await? == [12.0; LEN]);
    let part = theirs.part(7..9)?;
    drop(theirs);
    assert_eq!(stream.download(&part).await?, [3.0; 2]);
    Ok(())
}

#[tokio::test]
async fn empty_memory_is_shared_as_well() -> Result<()> {
    let device = testing::device();
    let (memory, descriptors) = device.shared::<u64>(0).await?.seal(&device, u64::MAX).await?;
    assert!(memory.is_empty());
    let theirs = device.import_shared::<u64>(&descriptors, 0, u64::MAX).await?;
    assert!(theirs.is_empty() && device.download(&theirs).await?.is_empty());
    let error = device.shared::<u64>(usize::MAX / 4).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
    Ok(())
}

/// Each field in its turn, and what is said of it.
#[tokio::test]
async fn wrong_headers_are_refused() -> Result<()> {
    let device = testing::device();
    let (_memory, good) = sealed(&device, 9).await?;
    let bytes = bytes_of(good.header.as_fd());
    let import = async |header: OwnedFd| {
        let from = SharedDescriptors { header, memory: good.memory.try_clone().expect("one more") };
        device.import_shared::<u32>(&from, LEN, 9).await.map(drop)
    };
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..][..to.len()].copy_from_slice(to);
        memfd(&bytes, ALL_SEALS)
    };
    import(changed(0, b"gpuawait")).await?;
    let other_kind = if device.kind() == DeviceKind::Host { 1 } else { 2 };
    let wrong: [(usize, &[u8], &str); 16] = [
        (0, b"G", "of its header cannot be used (it does not begin as one)"),
        (8, &[2], "its header is of version 2, expected 1"),
        (12, &[other_kind], "it is on "),
        (12, &[3], "its kind of device is unknown"),
        (16, &[0x5a], "it is on "),
        (32, &[1], "its size is no multiple of its granularity"),
        (32, &[0; 8], "it is 0 bytes long, expected 3999996"),
        (32, &[0xff; 8], "its size is no multiple of its granularity"),
        (40, &[1], "its size is no multiple of its granularity"),
        (48, &999_998_u64.to_le_bytes(), "it has 999998 elements, expected 999999"),
        (48, &u64::MAX.to_le_bytes(), "bytes long, expected 18446744073709551615"),
        (56, &[1], "its elements are `u32` (1 bytes, aligned to 4), expected `u32` (4 bytes"),
        (60, &[3], "its elements have no size or alignment"),
        (64, &[8], "it is of generation 8, expected 9"),
        (72, &[bytes[72] ^ 1], "its contents have changed"),
        (80, &[0xff; 4], "its element type has no name"),
    ];
    for (at, to, said) in wrong {
        let error = import(changed(at, to)).await.expect_err(said);
        problem(&error);
        assert!(error.to_string().contains(said), "{at}: {error}");
    }
    // What is no header at all.
    let (pipe, _other_end) = std::io::pipe().expect("a pipe");
    let (socket, _other_end) = UnixStream::pair().expect("a socket");
    let file = |path| OwnedFd::from(File::open(path).expect("a file"));
    let others = [
        pipe.into(),
        socket.into(),
        file("/dev/null"),
        file("/proc/self/exe"),
        memfd(&bytes, 0),
        memfd(&bytes[..255], ALL_SEALS),
        good.memory.try_clone().expect("one more"),
    ];
    for header in others {
        let error = import(header).await.unwrap_err();
        assert!(
            matches!(problem(&error), SharedProblem::NotShared { what: "header", .. }),
            "{error}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn other_memory_is_refused() -> Result<()> {
    let device = testing::device();
    let before = device.memory()?.imported_bytes;
    let (_memory, good) = sealed(&device, 1).await?;
    let (pipe, _other_end) = std::io::pipe().expect("a pipe");
    let others = [
        pipe.into(),
        OwnedFd::from(File::open("/dev/null").expect("a file")),
        memfd(&[0; 4096], ALL_SEALS),
        memfd(&vec![0; 4 << 20], 0),
        good.header.try_clone().expect("one more"),
    ];
    for memory in others {
        let from = SharedDescriptors { memory, header: good.header.try_clone().expect("one more") };
        let error = device.import_shared::<u32>(&from, LEN, 1).await.unwrap_err();
        assert!(
            matches!(problem(&error), SharedProblem::NotShared { what: "memory", .. }),
            "{error}"
        );
    }
    assert_eq!(device.memory()?.imported_bytes, before);
    device.import_shared::<u32>(&good, LEN, 1).await?;
    Ok(())
}

#[tokio::test]
async fn expectations_are_compared() -> Result<()> {
    let device = testing::device();
    let (_memory, from) = sealed(&device, 3).await?;
    let error = device.import_shared::<u32>(&from, LEN, 4).await.unwrap_err();
    assert_eq!(*problem(&error), SharedProblem::Generation { expected: 4, found: 3 });
    let error = device.import_shared::<u32>(&from, LEN - 1, 3).await.unwrap_err();
    let (expected, found) = (LEN as u64 - 1, LEN as u64);
    assert_eq!(*problem(&error), SharedProblem::Len { expected, found });
    for error in [
        device.import_shared::<i32>(&from, LEN, 3).await.map(drop).unwrap_err(),
        device.import_shared::<u16>(&from, 2 * LEN, 3).await.map(drop).unwrap_err(),
        device.import_shared::<[u8; 4]>(&from, LEN, 3).await.map(drop).unwrap_err(),
    ] {
        assert!(matches!(problem(&error), SharedProblem::ElementType { .. }), "{error}");
    }
    let other = Device::host();
    let mut buffer = device.shared::<u32>(1).await?;
    device.fill(&mut buffer, 0).queued()?;
    let error = buffer.seal(&other, 3).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

/// Whether a descriptor closes on `exec`, as the system says.
fn closes_on_exec(descriptor: &OwnedFd) -> bool {
    let path = format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd());
    let info = std::fs::read_to_string(path).expect("a descriptor");
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
    let flags = i32::from_str_radix(flags.trim(), 8).expect("octal");
    flags & libc::O_CLOEXEC != 0
}

#[tokio::test]
async fn no_started_program_inherits_a_descriptor() -> Result<()> {
    let device = testing::device();
    let buffer = device.shared::<u32>(10).await?;
    let early = buffer.descriptors()?;
    let (_memory, late) = sealed(&device, 1).await?;
    let again = late.try_clone()?;
    for SharedDescriptors { memory, header, .. } in [&early, &late, &again] {
        assert!(closes_on_exec(memory) && closes_on_exec(header));
    }
    // A program that a program starts.
    let listed = Command::new("sh").args(["-c", "ls -l /proc/self/fd"]).output().expect("a shell");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("/proc/") && !listed.contains("gpu-await"), "{listed}");
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_of_a_thousand() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::nothing_is_left_of_a_thousand")) {
        return Ok(());
    }
    async fn one(device: &Device, n: u64) -> Result<()> {
        let mut buffer = device.shared::<u32>(100).await?;
        device.fill(&mut buffer, n as u32).queued()?;
        drop(buffer.descriptors()?);
        let (memory, descriptors) = buffer.seal(device, n).await?;
        let sent = descriptors.try_clone()?;
        drop((memory, descriptors));
        let memory = device.import_shared::<u32>(&sent, 100, n).await?;
        assert_eq!(device.download(&memory).await?[99], n as u32);
        Ok(())
    }
    let device = testing::device();
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("a folder").count();
    // Of a host device; on a GPU the account has to do.
    let is_mapped =
        || std::fs::read_to_string("/proc/self/maps").expect("maps").contains("memfd:gpu-await");
    let mut before = None;
    for round in 0..100 {
        try_join_all((0..10).map(|n| one(&device, 10 * round + n))).await?;
        if round == 2 {
            settled(&device);
            before = Some(descriptors());
        }
    }
    settled(&device);
    let before = before.expect("a hundred rounds");
    eventually("nothing is left", || descriptors() <= before && !is_mapped());
    Ok(())
}

/// All shared memory of the device is unmapped.
fn settled(device: &Device) {
    eventually("it is unmapped", || {
        let info = device.memory().expect("a device");
        (info.shared_bytes, info.imported_bytes) == (0, 0)
    });
}

#[tokio::test]
async fn the_limit_bounds_shared_memory() -> Result<()> {
    // The other one keeps this thread's turn on a GPU.
    let _turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let device = testing::builder().memory_limit_bytes(16 * MIB).named(&name)?;
    let stream = device.stream()?;
    let bytes = |mib: u64| (mib * MIB) as usize;
    // What a stream keeps is taken back.
    drop(stream.zeros::<u8>(bytes(12)).await?);
    let shared = device.shared::<u8>(bytes(7)).await?;
    let info = device.memory()?;
    assert_eq!((info.shared_bytes, info.imported_bytes), (8 * MIB, 0));
    assert_eq!(device.stats().shared_bytes, 8 * MIB);
    assert!(info.free_bytes <= 8 * MIB);
    let full = [
        stream.zeros::<u8>(bytes(9)).await.map(drop).unwrap_err(),
        device.shared::<u8>(bytes(9)).await.map(drop).unwrap_err(),
    ];
    for error in full {
        match *error.detail() {
            ErrorDetail::OutOfMemory { shared_bytes, limit_bytes, .. } => {
                assert_eq!((shared_bytes, limit_bytes), (8 * MIB, Some(16 * MIB)));
            }
            ref other => panic!("{other}"),
        }
        assert!(error.to_string().contains(", 8388608 shared"), "{error}");
    }
    let other = stream.zeros::<u8>(bytes(8)).await?;
    drop((shared, other));
    settled(&device);
    // Imports are their maker's.
    let shared = device.shared::<u8>(bytes(14)).await;
    let mut shared = shared?;
    stream.fill(&mut shared, 1).await?;
    let (memory, descriptors) = shared.seal(&device, 1).await?;
    let imported = device.import_shared::<u8>(&descriptors, bytes(14), 1).await?;
    let info = device.memory()?;
    assert_eq!((info.shared_bytes, info.imported_bytes), (14 * MIB, 14 * MIB));
    drop((memory, imported));
    settled(&device);
    Ok(())
}

#[tokio::test]
async fn drops_in_any_order_leave_nothing() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    settled(&device);
    for order in 0..6 {
        let mut buffer = device.shared::<u32>(LEN).await?;
        let gate = Gate::close(&a)?;
        let mut copy = a.zeros::<u32>(LEN).queued()?;
        b.fill(&mut buffer, 1).queued()?;
        a.copy(&buffer, &mut copy).queued()?;
        if order == 0 {
            drop(buffer);
            b.synchronize()?;
            assert_eq!(device.memory()?.shared_bytes, 4 * MIB, "a copy reads it");
            gate.open();
            assert!(a.download(&copy).await? == [1; LEN]);
        } else {
            gate.open();
            let (ours, descriptors) = buffer.seal(&device, order).await?;
            let theirs = device.import_shared::<u32>(&descriptors, LEN, order).await?;
            let gate = Gate::close(&a)?;
            a.copy(&theirs, &mut copy).queued()?;
            match order {
                1 => drop((ours, descriptors, theirs)),
                2 => drop((theirs, ours, descriptors)),
                3 => drop((descriptors, theirs.clone(), theirs, ours)),
                4 => drop((theirs.part(1..2)?, ours, theirs)),
                _ => drop((theirs, descriptors)),
            }
            gate.open();
            assert!(a.download(&copy).await? == [1; LEN]);
        }
        settled(&device);
    }
    Ok(())
}

/// What writes sealed memory by mistake, in a process that imported or made it, harms that process alone.
#[tokio::test]
async fn stray_writes_leave_the_contents() -> Result<()> {
    const NAME: &str = concat!(module_path!(), "::stray_writes_leave_the_contents");
    if let Some(how) = child::parameter() {
        let device = testing::device();
        let memory = if how == "own" {
            let (memory, descriptors) = sealed(&device, 5).await?;
            send(&socket(), &descriptors);
            memory
        } else {
            device.import_shared::<u32>(&receive(&socket()), LEN, 5).await?
        };
        let (mut target, stream) = (astray(&memory, &device), device.stream()?);
        let source = stream.full(LEN, 1_u32).await?;
        let axpy = kernels::axpy::load(&device).await?;
        let written = match how.as_str() {
            "copy" => stream.copy(&source, &mut target),
            "fill" | "own" => stream.fill(&mut target, 1),
            _ => {
                let ones = source.view().cast::<f32>()?;
                axpy.launch(&stream, 1.0, &ones, &mut target.view_mut().cast::<f32>()?)
            }
        };
        // On a host device it is ended here.
        let outcome = written.await;
        println!("{how}: {outcome:?}");
        std::process::exit(i32::from(outcome.is_err()));
    }
    let device = testing::device();
    let (memory, descriptors) = sealed(&device, 5).await?;
    for how in ["kernel", "copy", "fill", "own"] {
        let (child, socket) = start_with_socket(child::command(NAME, how));
        let descriptors = match how {
            "own" => receive(&socket),
            _ => descriptors.try_clone()?,
        };
        if how != "own" {
            send(&socket, &descriptors);
        }
        let output = child.wait_with_output().expect("its end");
        if device.kind() == DeviceKind::Host {
            assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{how}: {output:?}");
        }
        // Its digest is compared.
        let again = device.import_shared::<u32>(&descriptors, LEN, 5).await?;
        assert!(device.download(&again).await? == pattern(), "{how}");
        assert!(device.download(&memory).await? == pattern(), "{how}");
    }
    Ok(())
}

/// The sum of words of 8 bytes, each mixed with its place.
fn digest_of(bytes: &[u8]) -> u64 {
    let mut sum = 0_u64;
    for (at, part) in bytes.chunks(8).enumerate() {
        let word = part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let mut z = word ^ (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        sum = sum.wrapping_add(z ^ (z >> 31));
    }
    sum
}

#[tokio::test]
async fn the_digest_is_that_of_the_bytes() -> Result<()> {
    let device = testing::device();
    for len in [0, 1, 7, 8, 9, 255, 4096, 99_999, 5 << 20] {
        let bytes: Vec<u8> =
            (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut buffer = device.shared::<u8>(len).await?;
        device.copy(&device.upload(bytes.clone()).queued()?, &mut buffer).queued()?;
        let (_memory, descriptors) = buffer.seal(&device, 1).await?;
        assert_eq!(descriptors.info()?.digest, digest_of(&bytes), "{len}");
    }
    Ok(())
}

/// No process writes what is sealed, by whatever call.
#[tokio::test]
async fn the_system_refuses_writers_of_sealed_files() -> Result<()> {
    let device = Device::host();
    let (memory, descriptors) = sealed(&device, 1).await?;
    for file in [descriptors.memory, descriptors.header] {
        let file = File::from(file);
        let refused = file.write_at(&[1], 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
    assert!(device.download(&memory).await? == pattern());
    Ok(())
}

#[tokio::test]
async fn dropped_futures_leave_nothing() -> Result<()> {
    let device = testing::device();
    settled(&device);
    let (memory, descriptors) = sealed(&device, 1).await?;
    for polls in 0..6 {
        let mut make = Box::pin(device.shared::<u32>(LEN).fuse());
        let mut import = Box::pin(device.import_shared::<u32>(&descriptors, LEN, 1).fuse());
        let mut buffer = device.shared::<u32>(LEN).await?;
        device.fill(&mut buffer, 1).queued()?;
        let mut seal = Box::pin(buffer.seal(&device, 1).fuse());
        for _ in 0..polls {
            drop((&mut make).now_or_never());
            drop((&mut import).now_or_never());
            drop((&mut seal).now_or_never());
            tokio::task::yield_now().await;
        }
    }
    drop((memory, descriptors));
    settled(&device);
    Ok(())
}

/// What may be written is never taken for what is sealed, nor the other way round.
#[tokio::test]
async fn sealed_and_mutable_memory_are_told_apart() -> Result<()> {
    let device = testing::device();
    let mut memory = device.shared::<u32>(LEN).await?;
    device.fill(&mut memory, 1).await?;
    let handed = mutable::hand_over(&memory, 5)?;
    let info = handed.info()?;
    assert_eq!((info.is_mutable, info.generation, info.digest), (true, 5, 0));
    let error = device.import_shared::<u32>(&handed, LEN, 5).await.unwrap_err();
    assert_eq!(problem(&error), &SharedProblem::NotSealed);
    let before = mutable::digest(&device, &memory).await?;
    drop(memory);
    // It is there, as it was, and can be written; under its own number, type and length alone.
    for (len, generation) in [(LEN, 6), (LEN - 1, 5)] {
        // SAFETY: it fails.
        let import = unsafe { mutable::import::<u32>(&device, &handed, len, generation) };
        problem(&import.await.unwrap_err());
    }
    // SAFETY: nobody else has it.
    let import = unsafe { mutable::import::<u32>(&device, &handed, LEN, 5) };
    let mut memory = import.await?;
    assert_eq!(mutable::digest(&device, &memory).await?, before);
    device.fill(&mut memory, 2).queued()?;
    mutable::settled(&memory)?.await?;
    assert_ne!(mutable::digest(&device, &memory).await?, before);
    assert_eq!(device.download(&memory).await?[LEN - 1], 2);
    let (_frozen, descriptors) = sealed(&device, 5).await?;
    // SAFETY: it fails.
    let import = unsafe { mutable::import::<u32>(&device, &descriptors, LEN, 5) };
    let error = import.await.unwrap_err();
    assert!(matches!(problem(&error), SharedProblem::NotShared { what: "header", .. }), "{error}");
    Ok(())
}
