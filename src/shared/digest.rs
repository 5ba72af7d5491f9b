//! The digest of memory: a kernel and its twin.
//!
//! A sum of the 8-byte words, each mixed with its position. It detects mistakes, but can be forged.

use std::convert::Infallible;

use gpu_await_protocol::sync::Mutex;

use crate::Grid;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Element;
use crate::memory::view::View;
use crate::thread::worker::offload;

#[expect(dead_code, reason = "what every declaration has")]
mod declared {
    use crate::{LaunchConfig, kernel};

    kernel! {
        /// Adds the digest of `x` to `sum`.
        pub(super) unsafe fn digest(x: &[u8], sum: &mut [u64], bytes: u64 = x.len())
            where sum.len() == 1;
        launch = LaunchConfig::new((x.len() / 2048).clamp(1, 2048), 256);
        ptx = include_str!("../../kernels/digest.ptx");
        host = super::twin;
    }

    /// Loads it on the calling thread.
    pub(super) fn load(home: &crate::device::home::Home) -> crate::Result<digest> {
        Ok(digest { kernel: crate::kernel::declared::Declared::load_now(home)? })
    }
}

/// The device's kernel, loaded on first use. Loading waits for running kernels, so it has its own lock and runs off the executor.
#[derive(Default)]
struct Loaded(Mutex<Option<declared::digest>>);

async fn load(device: &Device) -> Result<declared::digest> {
    let home = device.home().clone();
    let Ok(loaded) = home.get_or_load(|| Ok::<_, Infallible>(Loaded::default()));
    if let Some(known) = loaded.0.try_lock().and_then(|loaded| loaded.clone()) {
        return Ok(known);
    }
    offload(move || {
        let mut loaded = loaded.0.lock();
        if let Some(known) = &*loaded {
            return Ok(known.clone());
        }
        Ok(loaded.insert(declared::load(&home)?).clone())
    })
    .await?
}

/// The digest of memory, by a kernel on the current stream.
pub(super) async fn of<T: Element>(device: &Device, memory: View<'_, T>) -> Result<u64> {
    let (kernel, stream) = (load(device).await?, device.current_stream());
    let mut sum = stream.zeros::<u64>(1).queued()?;
    kernel.launch(&stream, &memory.cast::<u8>()?, &mut sum).queued()?;
    Ok(stream.download(&sum).await?[0])
}

fn twin(_: &Grid, x: &[u8], sum: &mut [u64], _bytes: u64) {
    let words = x.chunks(8).zip(1_u64..).map(|(bytes, at)| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let mut z = u64::from_le_bytes(word) ^ at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    });
    sum[0] = words.fold(sum[0], u64::wrapping_add);
}
