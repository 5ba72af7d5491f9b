//! Memory that is used again holds what was there: nobody is shown it.

use gpu_await::{Copy2d, Device, ErrorDetail, Op, kernels};

use super::{async_under_the_stand_in, eventually, my_names, soon};

/// What the memory held before.
const SECRET: f32 = 1234.5;
const LEN: usize = 1000;

fn is_refused<T>(op: Op<T>) {
    let error = op.submitted().map(drop).expect_err("nobody wrote it");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

#[test]
fn a_block_used_again_shows_nothing() {
    async_under_the_stand_in(async |driver| {
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let scale = kernels::scale::load(&device).await.unwrap();
        let mut to = stream.zeros::<f32>(LEN).queued().unwrap();
        let mut ones = device.pinned::<f32>(LEN).unwrap();
        ones.fill(1.0);
        let again = || {
            drop(stream.full(LEN, SECRET).queued().unwrap());
            stream.empty::<f32>(LEN).queued().unwrap()
        };
        let mut x = again();
        // It is there for who vouches for himself.
        // SAFETY: nothing else uses the buffer, which outlives the await.
        let past = unsafe { x.view().untracked() };
        assert_eq!(soon(stream.download(&past)).await.unwrap(), [SECRET; LEN]);

        driver.clear();
        let gaps = Copy2d::new(1, 100).source_pitch(10).destination_pitch(10);
        is_refused(stream.download(&x));
        is_refused(stream.download_vec(&x.slice(5..6).unwrap()));
        is_refused(stream.download(&x.view().cast::<u8>().unwrap()));
        is_refused(stream.copy_2d(&x, &mut to, Copy2d::new(1, 100).source_pitch(10)));
        is_refused(stream.copy(&x, &mut to));
        assert!(soon(stream.download_staged(&x)).await.is_err());
        is_refused(scale.launch(&stream, 1.0, &mut x));
        let asked = |name: &String| name.contains("Memcpy") || name.contains("Launch");
        assert!(!my_names(driver).iter().any(asked), "{:?}", my_names(driver));
        let mut x = again();
        is_refused(stream.upload_2d(ones, &mut x, gaps));
        let to = stream.zeros::<f32>(LEN).queued().unwrap();
        let mut x = again();
        is_refused(stream.copy_2d(&to, &mut x, gaps));
        is_refused(again().freeze());
    });
}

/// Pinned memory that a copy fills is given out as it is; what the user gets is zero.
#[test]
fn pinned_memory_used_again_is_zero() {
    async_under_the_stand_in(async |_| {
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let x = stream.full(LEN, SECRET).queued().unwrap();
        let seen = soon(stream.download(&x)).await.unwrap();
        let at = seen.as_ptr();
        drop(seen);
        // Back in the pool once the stream has seen to its share, which may be after who awaits it.
        soon(stream.done()).await.unwrap();
        eventually("it is back", || device.stats().pinned_used_bytes == 0);
        let fresh = stream.pinned::<f32>(LEN).unwrap();
        assert_eq!((fresh.as_ptr(), &fresh[..]), (at, &[0.0; LEN][..]));
        drop(fresh);
        let fresh = soon(device.pinned_async::<f32>(LEN)).await.unwrap();
        assert_eq!((fresh.as_ptr(), &fresh[..]), (at, &[0.0; LEN][..]));
    });
}
